"""Where the inputs of a step are known, "auto" is the planner's answer, and the report shows what it said."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device.throttled import Speed, ThrottledDevice
from stronghold.engine.planning import auto
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.planner.machine_file import DISK, Spread
from stronghold.probing.operator_speed import dtype_name
from stronghold.units import format_bytes
from tests.crossed import crossed
from tests.planner.machines import about, laptop, machine
from tests.probing.small import make_short
from tests.small_ring import make_the_ring_small

CONFIG = GPTConfig(layers=6, hidden=64, heads=4, sequence=32, vocabulary=128)


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A laptop that was probed; what is put into ``kept`` is another machine."""
    kept = [laptop()]
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: kept[-1])
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)
    monkeypatch.setattr("stronghold.engine.planning.auto._glances", {})
    return kept


def ids(samples=4):
    return torch.randint(0, 128, (samples, 32), generator=torch.Generator().manual_seed(1))


def inputs(samples=4):
    return {"input_ids": ids(samples), "labels": ids(samples)}


def gpt():
    torch.manual_seed(0)
    return GPT(CONFIG)


def trained(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(**inputs()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_gpu(here, model, there=None, **settings):
    """Offloads to a device with a memory of its own, that computes on the CPU."""
    here.append(there or machine())
    device = ThrottledDevice(Speed(flops=1e12, up=1e10, down=1e10, host=1e10), tokens=128)
    return stronghold.offload(model, device=device, **settings)


def test_a_model_that_fits_stays_where_it_is_and_says_so(caplog):
    with caplog.at_level(logging.INFO, logger="stronghold"):
        model = stronghold.offload(gpt(), device="cpu", inputs=inputs())
    report = stronghold.report(model)
    assert report.resident == 6
    assert report.planned.reason.startswith("the model fits, and stays; ")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "stronghold"]
    assert report.planned.chosen in line
    assert report.planned.reason in line


@pytest.mark.parametrize(
    "budget", [pytest.param("1.5MiB", marks=pytest.mark.long), "2MiB", pytest.param("3MiB", marks=pytest.mark.long)]
)
def test_settings_are_those_of_the_plan_and_train_as_the_plain_model(here, budget):
    model = on_a_gpu(here, gpt(), inputs=inputs(), device_memory=budget)
    plan = stronghold.plan(
        gpt(), machine=here[-1], inputs=inputs(), update="deferred", device_memory=budget, accumulate=None
    )
    report = stronghold.report(model)
    assert report.planned == plan.planned()
    assert report.resident == plan.settings["resident"] < 6
    assert report.window == min(plan.settings["window"], 6 - report.resident)
    plain = gpt()
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    optimizer = stronghold.AdamW(model.parameters())
    assert trained(model, optimizer) == pytest.approx(expected, rel=1e-6)
    assert stronghold.report(model).device_bytes == plan.held_device_bytes


@pytest.mark.parametrize(("host_ns", "update"), [(0.001, "deferred"), (50.0, "in_backward")])
def test_the_optimizer_updates_where_the_plan_finds_the_shorter_step(here, host_ns, update):
    """A slow host hides updates under the backward pass, which is longer than the next forward pass."""
    one = {"alone": about(host_ns), "beside_compute": about(host_ns)}
    slow = machine(host_update_ns={f"{dtype}+fp32": one for dtype in ("float32", "bfloat16")})
    model = on_a_gpu(here, gpt(), there=slow, inputs=inputs(), window=2, resident=0, activations="recompute")
    planned = stronghold.engine.engine_of(model).planned
    assert set(planned) == {"deferred", "in_backward", "muon deferred", "muon in_backward"}
    assert planned.gain_in_backward() == (update == "in_backward")
    assert not stronghold.AdamW(model.parameters()).in_backward
    assert not stronghold.AdamW(model.parameters(), update="auto", max_grad_norm=1.0).in_backward
    optimizer = stronghold.AdamW(model.parameters(), update="auto")
    assert optimizer.in_backward == (update == "in_backward")
    assert f"update={update!r}" in stronghold.report(model).planned.chosen
    plain = gpt()
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    assert trained(model, optimizer) == pytest.approx(expected, rel=1e-6)


def test_where_the_gradients_do_not_all_fit_layers_are_updated_in_the_backward_pass():
    config = replace(CONFIG, layers=16)
    torch.manual_seed(0)
    plain = GPT(config)
    given = copy.deepcopy(plain)
    with pytest.raises(BudgetError) as refused:
        stronghold.plan(given, machine=laptop(), inputs=inputs(), update="deferred", host_memory=1)
    least = refused.value.needed["memory"] - 300 * 2**20
    model = stronghold.offload(given, device="cpu", inputs=inputs(), host_memory=least - 1)
    planned = stronghold.engine.engine_of(model).planned
    assert {name for name in planned if not name.startswith("muon")} == {"in_backward"}
    optimizer = stronghold.AdamW(model.parameters(), update="auto")
    assert optimizer.in_backward
    report = stronghold.report(model)
    assert report.resident == 16  # no layer's gradient is kept there either
    held = report.slots_device_bytes + report.gradients_device_bytes + report.root_device_bytes
    held += report.resident_device_bytes + report.pinned_host_bytes + report.pageable_host_bytes
    assert held < least
    expected = trained(plain, torch.optim.AdamW(plain.parameters()))
    assert trained(model, optimizer) == pytest.approx(expected, rel=1e-6)


def test_a_loop_that_accumulates_is_planned_for_deferred_updates_alone(here):
    one = {"alone": about(0.001), "beside_compute": about(50.0)}  # updates would be hidden in the backward pass
    slow = machine(host_update_ns={f"{dtype}+fp32": one for dtype in ("float32", "bfloat16")})
    settings = {"window": 2, "resident": 0, "activations": "recompute", "accumulate": 3}
    model = on_a_gpu(here, gpt(), there=slow, inputs=inputs(), **settings)
    planned = stronghold.engine.engine_of(model).planned
    assert set(planned) == {"deferred", "muon deferred"}
    assert planned["deferred"].passes == 3
    with pytest.raises(ValueError, match="a loop that accumulates"):
        stronghold.AdamW(model.parameters(), update="in_backward")
    optimizer = stronghold.AdamW(model.parameters(), update="auto")
    assert not optimizer.in_backward
    for _ in range(2):
        for _ in range(3):
            model(**inputs()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = stronghold.report(model)
    assert report.step.passes == 3
    assert report.planned == planned["deferred"]


def test_and_where_their_gradients_do_not_fit_that_is_refused(here):
    for accumulate in (None, 3):
        with pytest.raises(BudgetError) as refused:
            stronghold.offload(gpt(), device="cpu", inputs=inputs(), host_memory=1, accumulate=accumulate)
        assert ("in_backward" in str(refused.value)) == (accumulate is None)


@pytest.mark.parametrize(("planned", "given"), [(1, 1), (1, None), (3, 3), (3, None)])
def test_a_plan_knows_how_many_batches_a_step_has(here, planned, given):
    plan = stronghold.plan(gpt(), machine=this_machine(here), inputs=inputs(), accumulate=planned)
    model = stronghold.offload(gpt(), device="cpu", plan=plan, accumulate=given)
    assert stronghold.report(model).planned.passes == planned
    with pytest.raises(ValueError, match="a plan holds for its own settings \\(got accumulate=2 "):
        stronghold.offload(gpt(), device="cpu", plan=plan, accumulate=2)


def test_without_a_plan_updates_are_deferred():
    model = stronghold.offload(gpt(), device="cpu", window=2)
    assert not stronghold.AdamW(model.parameters(), update="auto").in_backward
    assert stronghold.report(model).planned is None


def test_inputs_may_be_one_tensor_or_several_in_order(here):
    for given in (ids(), [ids()], torch.empty((4, 32), dtype=torch.int64, device="meta")):
        assert stronghold.report(stronghold.offload(gpt(), device="cpu", inputs=given)).resident == 6


def test_what_the_user_sets_is_kept(here):
    wanted = {"window": 2, "resident": 1, "micro_batch": 2, "activations": "keep"}
    model = on_a_gpu(here, gpt(), inputs=inputs(), **wanted)
    chosen = stronghold.report(model).planned.chosen
    assert all(f"{name}={value!r}" in chosen for name, value in wanted.items())
    assert (stronghold.report(model).window, stronghold.report(model).resident) == (2, 1)


def test_one_thing_alone_can_be_left_to_the_planner(here):
    model = on_a_gpu(here, gpt(), inputs=inputs(), window=2, activations="recompute", resident=0)
    assert (stronghold.report(model).window, stronghold.report(model).resident) == (2, 0)


def test_activations_in_host_memory_stay_there(here):
    model = on_a_gpu(here, gpt(), inputs=inputs(), activations="host", device_memory="2MiB")
    plain = gpt()
    losses = trained(model, stronghold.AdamW(model.parameters()))
    assert losses == pytest.approx(trained(plain, torch.optim.AdamW(plain.parameters())), rel=1e-6)
    assert stronghold.engine.engine_of(model).activations is not None


def test_a_store_on_disk_stays_there(here, tmp_path):
    here.append(laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))}))
    model = stronghold.offload(gpt(), device="cpu", store=tmp_path, inputs=inputs())
    report = stronghold.report(model)
    assert report.weights_on_disk == 6 - report.resident
    assert stronghold.report(stronghold.offload(gpt(), device="cpu", inputs=inputs())).planned is not None
    stronghold.close(model)


def test_a_machine_that_was_never_probed_is_glanced_at_once(here, monkeypatch):
    seen = []
    monkeypatch.setattr("stronghold.engine.planning.auto.glance", lambda *of: seen.append(of) or laptop())
    here.append(None)
    for _ in range(2):
        assert stronghold.report(stronghold.offload(gpt(), device="cpu", inputs=inputs())).resident == 6
    assert [dtypes for _, _, dtypes in seen] == [(torch.float32,)]
    stronghold.offload(gpt(), device="cpu", inputs=inputs(), dtype=torch.bfloat16)
    assert [dtypes for _, _, dtypes in seen] == [(torch.float32,), (torch.bfloat16,)]


def test_a_store_that_is_not_there_yet_is_planned_for_by_the_disk_that_it_will_be_on(here, tmp_path, monkeypatch):
    make_short(monkeypatch)
    here.append(None)
    store = tmp_path / "run" / "store"
    model = stronghold.offload(gpt(), device="cpu", store=store, inputs=inputs())
    assert stronghold.report(model).planned is not None and store.is_dir()
    assert stronghold.report(model).weights_on_disk == 6 - stronghold.report(model).resident
    stronghold.close(model)
    here.append(laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))}))
    monkeypatch.setattr("stronghold.engine.planning.auto.glance", lambda *of: pytest.fail("it was probed above"))
    stronghold.close(stronghold.offload(gpt(), device="cpu", store=tmp_path / "other", inputs=inputs()))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16])
def test_a_glance_finds_what_a_plan_asks_for(here, monkeypatch, dtype):
    make_short(monkeypatch)
    here.append(None)
    model = stronghold.offload(gpt(), device="cpu", inputs=inputs(), dtype=dtype)
    (seen,) = auto._glances.values()
    assert {one.dtype for one in seen.matmul} == {dtype_name(dtype)}
    assert {one.dtype for one in seen.attention} == {dtype_name(dtype)}
    assert set(seen.host_update_ns) == {f"{dtype_name(dtype)}+fp32"}
    assert {"float32", dtype_name(dtype)} == set(seen.elementwise)
    assert stronghold.report(model).planned is not None


def test_a_device_of_another_kind_than_the_kept_one_is_glanced_at(here, monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.auto.glance", lambda *of: machine())
    device = ThrottledDevice(Speed(flops=1e12, up=1e10, down=1e10, host=1e10), tokens=128)
    model = stronghold.offload(gpt(), device=device, inputs=inputs())
    assert stronghold.report(model).resident == 6


def test_a_plan_gives_the_settings_and_is_shown_beside_what_was_measured(here, tmp_path):
    plan = stronghold.plan(gpt(), machine=this_machine(here), batch=4, sequence=32)
    plan.write(tmp_path / "plan.json")
    for given, compiled in ((plan, False), (tmp_path / "plan.json", "aot_eager")):
        model = stronghold.offload(gpt(), device="cpu", plan=given, compile=compiled)
        assumed = [*plan.assumed, *([auto.COMPILED] if compiled else [])]
        assert stronghold.report(model).planned == replace(plan, assumed=assumed).planned()
        trained(model, stronghold.AdamW(model.parameters()), steps=2)
        assert bool(stronghold.report(model).compiled) == bool(compiled)
        rows = stronghold.report(model).rows()
        begin = next(number for number, row in enumerate(rows) if row[0] == "plan")
        assert rows[begin] == ("plan", "settings", plan.planned().chosen)
        names = [name for _, name, _ in rows[begin:]]
        assert names[:5] == ["settings", "why", "planned", "measured", "computing"]
        assert rows[-1][0] == "off by"  # a machine that nobody has measured
        stronghold.close(model)


def this_machine(here):
    from stronghold.probing import facts_of

    return replace(here[-1], device_name=facts_of(torch.device("cpu")).device_name)


def test_what_cannot_be_is_refused_before_anything_is_changed(here):
    plan = stronghold.plan(gpt(), machine=this_machine(here), batch=4, sequence=32)
    elsewhere = stronghold.plan(gpt(), machine=here[-1], batch=4, sequence=32)
    other = stronghold.plan(GPT(replace(CONFIG, layers=5)), machine=this_machine(here), batch=4, sequence=32)
    in_bf16 = stronghold.plan(gpt(), machine=this_machine(here), batch=4, sequence=32, dtype=torch.bfloat16)
    frozen = gpt()
    next(frozen.parameters()).requires_grad_(False)
    of_frozen = stronghold.plan(frozen, machine=this_machine(here), batch=4, sequence=32)
    model = gpt()
    before = copy.deepcopy(model.state_dict())
    for settings, match in (
        ({"micro_batch": "auto"}, "micro_batch='auto' is chosen for the inputs of a step"),
        ({"activations": "auto"}, "activations='auto' is chosen for the inputs of a step"),
        ({"plan": plan, "inputs": inputs()}, "a plan is for inputs of its own"),
        ({"plan": plan, "window": 3}, "got window=3 beside one with 1"),
        ({"plan": plan, "resident": 0}, "got resident=0 beside one with 6"),
        ({"plan": plan, "activations": "recompute"}, "got activations='recompute' beside one with 'keep'"),
        ({"plan": plan, "store": "elsewhere"}, "got store='elsewhere' beside one with 'ram'"),
        ({"plan": other}, "a plan is of one model"),
        ({"plan": of_frozen}, f"a plan is for the parameters that are trained .*that trains {plan.parameters:,}"),
        ({"plan": elsewhere}, "a plan is of one machine"),
        (
            {"plan": in_bf16},
            r"a plan is of one type .got one in bfloat16 for a GPT in float32.; .*dtype=torch\.bfloat16",
        ),
        (
            {"plan": plan, "dtype": torch.bfloat16},
            r"got one in float32 for a GPT in bfloat16.; pass dtype=torch\.float32",
        ),
        ({"inputs": {"labels": ids()}}, "must run on tensors that have shapes"),
        ({"inputs": inputs(), "device_memory": "1GiB"}, "device_memory is planned with where a device has memory"),
        ({"inputs": inputs(), "host_memory": "1KiB"}, "nothing fits"),
        ({"inputs": inputs(), "micro_batch": 0}, "micro_batch must be a number of samples"),
        ({"inputs": inputs(), "activations": "nowhere"}, "activations must be"),
    ):
        with pytest.raises(ValueError, match=match):
            stronghold.offload(model, device="cpu", **settings)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert stronghold.engine.engine_of(model) is None


def test_a_step_as_planned_names_no_number_to_measure_again():
    planned = stronghold.plan(gpt(), machine=laptop(), batch=4, sequence=32).planned()
    as_planned = planned.rows(1.1 * planned.likely_s, planned.parts_s, {})
    assert [row[0] for row in as_planned if row[0]] == ["step"]
    slow = {**planned.parts_s, "disk_wait_s": planned.likely_s}
    assert planned.rows(2 * planned.likely_s, slow, {})[-1] == (
        "off by",
        "waiting for disk",
        "measure again the disk's: read, write: stronghold probe",
    )
    low_s, likely_s, high_s = Spread(planned.low_s, planned.likely_s, planned.high_s)
    assert low_s <= likely_s <= high_s


@pytest.mark.parametrize(
    ("slow", "named", "number"),
    [
        ({"flops": 3e8}, "computing", "the rates of operators"),
        ({"up": 1e6}, "waiting for a fetch", "the link's: h2d"),
        ({"host": 5e6}, "waiting for an update", "host_update_ns"),
    ],
)
def test_the_number_of_the_machine_that_is_off_is_the_one_to_measure_again(here, slow, named, number):
    """By the engine's own steps, a second each, on a device that is slower in one thing than the plan's machine."""
    here.append(machine())
    fast = {"flops": 1e12, "up": 1e10, "down": 1e10, "host": 1e10}
    device = ThrottledDevice(Speed(**fast | slow), tokens=128, paced=True)
    model = stronghold.offload(gpt(), device=device, inputs=inputs(), window=2, resident=0)
    trained(model, stronghold.AdamW(model.parameters()), steps=2)
    section, name, value = stronghold.report(model).rows()[-1]
    assert (section, name) == ("off by", named)
    assert value.startswith("measure again ") and number in value


def one_step(model):
    optimizer = stronghold.AdamW(model.parameters())
    before = stronghold.report(model)
    trained(model, optimizer, steps=1)
    return before, stronghold.report(model)


@pytest.mark.parametrize(("activations", "micro_batch"), crossed(["host", "disk"], [None, 2], together=1))
def test_layers_inputs_beside_the_device_are_planned_to_the_byte(here, tmp_path, activations, micro_batch):
    settings = {"window": 2, "resident": 1, "activations": activations}
    settings |= {"micro_batch": micro_batch or 4}  # 4 samples: whole
    there = machine()
    if activations == "disk":
        there = machine(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
        settings["store"] = tmp_path
    model = on_a_gpu(here, gpt(), there=there, inputs=inputs(), **settings)
    planned, of_inputs = stronghold.report(model).planned, stronghold.report(model).inputs_to_come_bytes
    assert of_inputs > 0
    before, after = one_step(model)
    assert (before.inputs_host_bytes, before.inputs_to_come_bytes) == (0, of_inputs)
    assert (after.inputs_host_bytes, after.inputs_to_come_bytes) == (of_inputs, 0)
    assert ("", "layers' inputs", f"{format_bytes(of_inputs)} more") in before.rows()
    assert after.host_bytes == before.host_bytes + of_inputs
    # The process counts as 300 MiB here.
    assert planned.host_bytes == after.host_bytes + 300 * 2**20
    inputs_bytes = 6 * 4 * 32 * 64 * 4  # of six layers, four samples of 32 tokens of 64 numbers
    assert (after.inputs_host_bytes if activations == "host" else after.inputs_disk_bytes) == inputs_bytes
    stronghold.close(model)


def test_a_budget_that_layers_inputs_would_overrun_is_refused_before_anything_is_placed(here):
    settings = {"window": 2, "resident": 0, "micro_batch": 4}
    needed = {}
    for activations in ("recompute", "host"):
        plain = gpt()
        with pytest.raises(BudgetError, match="host memory must hold at least") as refused:
            on_a_gpu(here, plain, inputs=inputs(), host_memory=1, activations=activations, **settings)
        needed[activations] = refused.value.needed["host"]
        assert type(plain.layers[0].forward).__name__ == "method"
    assert needed["host"] - needed["recompute"] == 6 * 4 * 32 * 64 * 4


def test_and_so_is_an_optimizer_that_leaves_them_no_room(here):
    settings = {"window": 2, "resident": 0, "micro_batch": 4, "activations": "host"}
    _, after = one_step(on_a_gpu(here, gpt(), inputs=inputs(), **settings))
    fits = on_a_gpu(here, gpt(), inputs=inputs(), host_memory=after.host_bytes, **settings)
    assert one_step(fits)[1].host_bytes == after.host_bytes
    model = on_a_gpu(here, gpt(), inputs=inputs(), host_memory=after.host_bytes - 1, **settings)
    with pytest.raises(BudgetError, match="held already and 192 KiB for layers' inputs"):
        stronghold.AdamW(model.parameters())


def test_beside_a_store_on_disk_the_budget_leaves_room_for_layers_inputs(here, tmp_path, monkeypatch):
    make_the_ring_small(monkeypatch, 2**18)
    host_memory = 4 * 2**18 + 3 * 2**20
    there = machine(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    settings = {"window": 2, "resident": 0, "micro_batch": 4, "store": tmp_path, "host_memory": host_memory}
    found = {}
    for activations in ("recompute", "host"):
        model = on_a_gpu(here, gpt(), there=there, inputs=inputs(), activations=activations, **settings)
        _, found[activations] = one_step(model)
        assert found[activations].host_bytes <= host_memory
        stronghold.close(model)
    assert found["host"].inputs_host_bytes == 6 * 4 * 32 * 64 * 4
    assert found["recompute"].weights_on_disk == 0 < found["host"].weights_on_disk < 6


def test_what_a_plan_assumes_of_compiled_layers_is_said(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.auto.kept_machine", lambda device: laptop())
    reasons = []
    for settings in ({}, {"compile": "aot_eager"}):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        model = stronghold.offload(model, device="cpu", inputs=(torch.empty(4, 16),), **settings)
        planned = stronghold.report(model).planned
        assert planned is not None
        reasons.append(planned.reason)
        stronghold.close(model)
    assert "assumed" not in reasons[0]
    assert "assumed: layers take as long as eager ones" in reasons[1]

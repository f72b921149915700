"""A plan's settings train, with the bytes that it says; what cannot be planned is refused before anything is loaded."""

import contextlib
import json
import random
import re
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.engine.planning.searched import _nothing_fits
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.lab.models.layered_gpt import LayeredGPT
from stronghold.planner.choices import Choice
from stronghold.planner.machine_file import DISK
from stronghold.planner.search import Refusal
from stronghold.probing.this_machine import processor_name
from tests import experts
from tests.crossed import crossed, seeds
from tests.planner.machines import about, laptop, machine

CONFIG = GPTConfig(layers=5, hidden=64, heads=4, sequence=32, vocabulary=128)


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch):
    monkeypatch.setattr("stronghold.engine.planning.given.kept_machine", lambda device: None)


@pytest.fixture(autouse=True)
def _process_of_known_size(monkeypatch):
    """Other tests leave hundreds of megabytes in this process, and what it has already counts against host_memory."""
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda model: 300 * 2**20)


def on_meta(config=CONFIG):
    with torch.device("meta"):
        return GPT(config)


def planned(model=None, given=None, **settings):
    return stronghold.plan(
        on_meta() if model is None else model, machine=given or laptop(), **{"batch": 4, "sequence": 32, **settings}
    )


def test_bytes_are_the_reports_where_the_routers_stay_in_fp32():
    plan = planned(experts.ernie(), dtype=torch.bfloat16, window=2, resident=1, activations="recompute")
    model = stronghold.offload(experts.ernie(), device="cpu", dtype=torch.bfloat16, **plan.settings)
    optimizer = stronghold.AdamW(model.parameters(), **plan.optimizer)
    ids = torch.randint(0, 64, (4, 32))
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = stronghold.report(model)
    assert {p.dtype for n, p in model.named_parameters() if "mlp.gate.weight" in n} == {torch.float32}
    assert plan.slots_bytes == found.slots_device_bytes
    assert plan.gradient_bytes == found.gradients_device_bytes
    assert plan.root_bytes == found.root_device_bytes
    assert plan.resident_bytes == found.resident_device_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == found.host_bytes


def told(plan):
    """Returns what a plan says beside what this process has in memory."""
    return {**asdict(plan), "process_bytes": 0, "others": [], "refused": []}


@pytest.mark.parametrize(
    ("dtype", "settings"),
    crossed(
        [None, torch.bfloat16],
        [
            {},
            {"window": 2, "resident": 1},
            {"window": 3, "resident": 0, "states": "8bit", "update": "in_backward"},
            {"window": 1, "store": "disk"},
            {"store": "disk", "states": "8bit", "host_memory": "1GiB"},
            {"window": 2, "store": "disk", "update": "in_backward"},
            {"window": 2, "resident": 1, "activations": "host"},
            {"window": 2, "resident": 0, "activations": "host", "micro_batch": 2},
            {"window": 2, "store": "disk", "activations": "disk"},
            {"window": 2, "store": "disk", "activations": "disk", "accumulate": 2},
            {"window": 2, "resident": 0, "activations": 2, "micro_batch": 2},
            {"accumulate": 2},
            {"window": 2, "resident": 1, "accumulate": 3},
            {"window": 2, "store": "disk", "accumulate": 2},
            {"window": 2, "resident": 1, "accumulate": None},
        ],
        together=1,
    ),
    ids=str,
)
def test_bytes_are_the_reports_to_the_byte(settings, dtype, tmp_path):
    here = laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    if settings.get("store") == "disk":
        settings = {**settings, "store": str(tmp_path)}
    plan, passes = planned(given=here, dtype=dtype, **settings), settings.get("accumulate", 1)
    model = stronghold.offload(GPT(CONFIG), device="cpu", dtype=dtype, **plan.settings)
    optimizer = stronghold.AdamW(model.parameters(), **plan.optimizer)
    ids = torch.randint(0, 128, (4, 32))
    for _ in range(2):
        for _ in range(passes or 1):
            model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    report = stronghold.report(model)
    streamed = plan.layers - plan.settings["resident"]
    assert (report.window, report.resident) == (min(plan.settings["window"], streamed), plan.settings["resident"])
    assert report.states == plan.optimizer["states"]
    assert plan.written_bytes == report.step.disk_written_bytes
    assert plan.slots_bytes == report.slots_device_bytes
    assert plan.gradient_bytes == report.gradients_device_bytes
    assert plan.root_bytes == report.root_device_bytes
    assert plan.resident_bytes == report.resident_device_bytes
    assert plan.root_gradient_bytes == (0 if passes == 1 else report.root_gradients_device_bytes)
    assert (plan.samples, report.step.passes) == (4 * (passes or 1), passes or 1)
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
    assert plan.disk_bytes == report.disk_bytes + report.inputs_disk_bytes
    stronghold.close(model)


def test_what_the_user_sets_is_kept_and_the_rest_is_chosen():
    plan = planned(given=machine(), window=2, resident=1, activations="keep", micro_batch=2, update="deferred")
    wanted = {"window": 2, "resident": 1, "activations": "keep", "micro_batch": 2}
    assert {name: plan.settings[name] for name in wanted} == wanted
    assert plan.optimizer == {"states": "fp32", "update": "deferred"}
    assert planned(given=machine()).step_s.likely <= plan.step_s.likely


def test_as_many_layers_keep_their_activations_as_the_memory_holds():
    """Where all of them do not fit and none leaves room, some are the shortest step: brute force over their numbers."""
    fixed = {"window": 1, "resident": 0, "micro_batch": None, "update": "deferred", "batch": 64}
    most, least = (planned(given=machine(), activations=one, **fixed) for one in ("keep", "recompute"))
    middle = (most.device_bytes + least.device_bytes) // 2
    plan = planned(given=machine(), device_memory=middle, **fixed)
    kept = plan.settings["activations"]
    assert isinstance(kept, int)
    layers = len(on_meta().layers)
    fitting = {}
    for number in range(layers + 1):
        with contextlib.suppress(BudgetError):
            fitting[number] = planned(given=machine(), device_memory=middle, activations=number, **fixed).step_s.likely
    assert 0 < max(fitting) < layers
    assert plan.step_s.likely == min(fitting.values()) < least.step_s.likely
    model = stronghold.offload(GPT(CONFIG), device="cpu", **{**plan.settings, "device_memory": None})
    assert [block.keep for block in engine_of(model).blocks] == [False] * (layers - kept) + [True] * kept
    stronghold.close(model)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_host_of_fewer_cores_is_slower_and_the_plan_says_what_is_assumed(processes):
    given = {"update": "deferred", "window": 1, "resident": 0} if processes == 1 else {"processes": 2, "batch": 8}
    model = on_meta() if processes == 1 else LayeredGPT(on_meta())
    many, few = (planned(model, machine(cores=64, host_memory_bytes=2**41), cores=cores, **given) for cores in (64, 1))
    assert any(
        text.startswith("1 cores, with memory in proportion: updates take 64 times as long") for text in few.assumed
    )
    if processes == 1:  # in two all layers stay on the devices, and are updated there
        assert few.step_s.likely > many.step_s.likely


@pytest.mark.parametrize("micro_batch", [None, pytest.param(1, marks=pytest.mark.long)])
def test_layers_inputs_on_the_host_go_there_and_back_over_the_link(micro_batch):
    given = {"given": machine(), "window": 2, "resident": 1, "update": "deferred", "micro_batch": micro_batch}
    there, here = (planned(activations=activations, **given) for activations in ("host", "recompute"))
    assert (there.settings["activations"], there.assumed) == ("host", [])
    pieces = 1 if micro_batch is None else 4
    one_s = 4 * 32 * 64 * 4 / 25e9 + pieces * 8e-6  # bytes of four samples by the link, and what each copy takes
    for lane in ("gradients", "fetches"):
        assert there.busy_s[lane] - here.busy_s[lane] == pytest.approx(5 * one_s, rel=1e-6)
    assert there.busy_s["compute"] > here.busy_s["compute"]  # they are copied into their slot
    assert there.pinned_bytes - here.pinned_bytes == 5 * 4 * 32 * 64 * 4
    frozen = on_meta()
    frozen.embedding.requires_grad_(False)
    fewer = planned(frozen, activations="host", **given)
    assert there.busy_s["gradients"] - fewer.busy_s["gradients"] >= one_s * (1 - 1e-6)  # the first layer's stay


def test_layers_inputs_on_disk_are_planned_for_with_a_store_there(tmp_path):
    given = machine(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    fixed = {"given": given, "store": str(tmp_path), "window": 2, "resident": 0, "update": "deferred"}
    there, here = (planned(activations=activations, **fixed) for activations in ("disk", "recompute"))
    assert (there.settings["activations"], there.settings["store"]) == ("disk", [str(tmp_path)])
    assert there.assumed == []
    # All are written; when the backward pass begins the last three layers' are in staging still, and two are read.
    one_s = 4 * 32 * 64 * 4 / 2e9  # a disk that is as fast while it does both does twice as much
    assert there.busy_s["disk"] - here.busy_s["disk"] == pytest.approx((5 + 2) * one_s, rel=1e-6)
    assert there.written_bytes - here.written_bytes == 5 * 4 * 32 * 64 * 4


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_what_just_fits_one_memory_with_a_disk_is_taken_by_offload(states, update, tmp_path):
    """The least that is said to be enough, of a model that is larger than the ring through which disks are updated."""
    here = laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    config = replace(CONFIG, layers=6, hidden=768)
    asked = {"store": str(tmp_path), "window": 1, "resident": 1, "states": states, "update": update}
    with pytest.raises(BudgetError) as refused:
        planned(on_meta(config), here, host_memory="100MiB", **asked)
    enough = refused.value.needed["memory"] + 2**20  # what this process takes may have grown by then
    plan = planned(on_meta(config), here, host_memory=enough, **asked)
    model = stronghold.offload(GPT(config), device="cpu", **plan.settings)
    optimizer = stronghold.AdamW(model.parameters(), **plan.optimizer)
    model(ids := torch.randint(0, 128, (4, 32)), labels=ids).loss.backward()
    optimizer.step()
    taken = stronghold.report(model).host_bytes
    assert plan.pinned_bytes + plan.pageable_bytes == taken <= plan.settings["host_memory"]
    assert plan.host_bytes <= enough
    stronghold.close(model)


@pytest.mark.parametrize("seed", seeds(24, 4))
def test_what_is_said_to_fit_one_memory_with_a_disk_does(seed, tmp_path):
    """Of random models and settings, under a cap between the least and half as much again."""
    rng, here = random.Random(seed), laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    config = replace(
        CONFIG, layers=rng.randint(2, 6), hidden=rng.choice((256, 640)), vocabulary=rng.choice((128, 4000))
    )
    passes, dtype = rng.choice((1, 1, 2)), rng.choice((None, torch.bfloat16))
    resident = rng.randint(0, config.layers - 1)
    asked = {
        "store": str(tmp_path),
        "dtype": dtype,
        "window": rng.randint(1, config.layers - resident),
        "resident": resident,
        "activations": rng.randint(0, config.layers),
        "micro_batch": rng.choice((None, 2)),
        "states": rng.choice(("fp32", "8bit")),
        "update": "deferred" if passes > 1 else rng.choice(("deferred", "in_backward")),
        "accumulate": passes,
    }
    with pytest.raises(BudgetError) as refused:
        planned(on_meta(config), here, host_memory="100MiB", **asked)
    cap = int(refused.value.needed["memory"] * rng.uniform(1.0, 1.5)) + 2**20
    plan = planned(on_meta(config), here, host_memory=cap, **asked)
    model = stronghold.offload(GPT(config), device="cpu", dtype=dtype, **plan.settings)
    optimizer = stronghold.AdamW(model.parameters(), **plan.optimizer)
    for _ in range(passes):
        model(ids := torch.randint(0, 128, (4, 32)), labels=ids).loss.backward()
    optimizer.step()
    report = stronghold.report(model)
    assert plan.pinned_bytes + plan.pageable_bytes == report.host_bytes
    assert plan.held_device_bytes == report.device_bytes
    assert plan.host_bytes <= cap
    stronghold.close(model)


def test_a_model_that_fits_a_machine_of_one_memory_stays_where_it_is():
    assert planned().settings["resident"] == 5


def test_where_one_memory_does_not_hold_all_gradients_layers_are_updated_in_the_backward_pass():
    model = on_meta(replace(CONFIG, layers=8))
    needed = {}
    for update in ("deferred", "in_backward", None):
        with pytest.raises(BudgetError) as refused:
            planned(model, update=update, host_memory="300MiB")
        needed[update] = refused.value.needed["memory"]
    assert needed[None] == needed["in_backward"] < needed["deferred"]
    plan = planned(model, host_memory=2 * needed["deferred"])
    assert (plan.settings["resident"], plan.optimizer["update"]) == (8, "deferred")
    plan = planned(model, host_memory=needed["deferred"] - 1)
    assert (plan.settings["resident"], plan.optimizer["update"]) == (8, "in_backward")
    assert plan.host_bytes < needed["deferred"]


def test_the_others_are_no_faster_and_the_low_and_high_step_enclose_the_likely_one():
    plan = planned(given=machine(device_memory_bytes=2 * 2**20))
    assert plan.step_s.low <= plan.step_s.likely <= plan.step_s.high
    assert all(plan.step_s.likely <= other.step_s for other in plan.others)
    assert plan.device_bytes <= 2 * 2**20
    assert all(one.needed_bytes > one.limit_bytes for one in plan.refused)


def test_nothing_is_changed_and_a_real_model_is_planned_for_like_one_on_meta():
    model = GPT(CONFIG)
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert told(planned(model)) == told(planned())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(p.grad is None and p.device.type == "cpu" for p in model.parameters())


def test_transformers_models_are_planned_for_by_module_configuration_and_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
    )
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    plans = [planned(given) for given in (module, config, tmp_path, tmp_path / "config.json")]
    assert all(told(plan) == told(plans[0]) for plan in plans)
    assert plans[0].layers == 3


def test_any_module_is_planned_for_by_its_inputs():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    plan = stronghold.plan(model, machine=laptop(), inputs=(torch.empty(8, 64, device="meta"),), name="a tower")
    assert (plan.model, plan.samples, plan.tokens, plan.layers) == ("a tower", 8, 8, 4)


def test_a_budget_of_one_memory_is_told_to_the_byte_where_it_lacks_little():
    with pytest.raises(BudgetError) as raised:
        planned(host_memory=1000)
    needed = raised.value.needed["memory"]
    with pytest.raises(
        BudgetError, match=rf"nothing fits: memory must hold at least {needed:,} bytes \(got {needed - 1:,}\)"
    ):
        planned(host_memory=needed - 1)


def test_budgets_that_nothing_fits_are_told_with_the_least_that_would_do():
    with pytest.raises(
        BudgetError, match=r"nothing fits: device memory must hold at least .* \(got 1000 B\)"
    ) as raised:
        planned(given=machine(), device_memory=1000)
    needed = raised.value.needed["device"]
    assert planned(given=machine(), device_memory=needed).device_bytes <= needed
    with pytest.raises(BudgetError):
        planned(given=machine(), device_memory=needed - 1)


def test_two_budgets_that_lack_are_told_with_what_would_do_for_both():
    with pytest.raises(BudgetError) as raised:
        planned(given=machine(), device_memory=1000, host_memory=1000)
    needed = raised.value.needed
    assert set(needed) == {"device", "host"}
    assert re.search("; and (host|device) memory must hold", str(raised.value))
    plan = planned(given=machine(), device_memory=needed["device"], host_memory=needed["host"])
    assert plan.device_bytes <= needed["device"]
    assert plan.host_bytes <= needed["host"]


def test_of_budgets_that_other_choices_lack_one_or_the_other_is_to_be_raised():
    """One choice lacks on the device alone, another one in the host's memory."""

    def lacks(resident, **lacking):
        (place,) = lacking
        choice = Choice(window=1, resident=resident)
        return Refusal(choice=choice, place=place, needed_bytes=2**20, limit_bytes=2**10, lacking=lacking)

    told = str(_nothing_fits([lacks(5, device=2**20), lacks(0, host=2**20)], has_experts=False, on_disk=True))
    assert re.search(
        r"device memory must hold at least 1\.00 MiB .*; or host memory must hold at least 1\.00 MiB", told
    )
    assert "give a directory" not in told


def test_a_model_that_cannot_be_built_without_values_is_refused_in_one_line(tmp_path):
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 30,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"model must be a module, a configuration.*(30|head|hidden)") as raised:
        stronghold.plan(str(tmp_path), machine=laptop(), sequence=8)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": 3}, "model must be a module, a configuration of transformers, or its config.json"),
        ({"model": "/nowhere"}, "model must be a module"),
        (
            {"model": on_meta().requires_grad_(False)},
            r"something must be trained \(got GPT, all frozen\); add adapters",
        ),
        ({"sequence": None}, r"GPT must be given inputs to be planned for \(got sequence=None"),
        ({"window": 6}, r"window must be a number of layers from 1 to 5 \(got 6\)"),
        ({"resident": -1}, r"resident must be a number of layers from 0 to 5 \(got -1\)"),
        ({"states": "fp64"}, "states must be"),
        ({"update": "never"}, "update must be"),
        ({"activations": "all"}, "activations must be"),
        ({"activations": "disk"}, r"in the store's directory \(got store='ram'\)"),
        ({"activations": "host", "processes": 2}, r"for one process \(got activations='host' with processes=2\)"),
        ({"activations": 99}, r"no more layers than there are.*\(got 99\)"),
        ({"micro_batch": "some"}, "micro_batch must be"),
        ({"store": "/mnt/nowhere"}, "the machine must have the speed of each directory of the store"),
        (
            {"device_memory": "1GiB"},
            r"device_memory is planned with where .* memory of its own \(got 1GiB on a processor\); pass host_memory",
        ),
        (
            {"device_memory": "1GiB", "processes": 2},
            "device_memory is planned with where a device has memory of its own",
        ),
        ({"device_memory": "lots", "given": machine()}, "lots"),
    ],
)
def test_what_cannot_be_planned_for_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        planned(**{"model": None, **change})


def test_a_machine_that_was_not_measured_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"a plan needs a machine that was measured .* call stronghold.probe\(\) once"):
        stronghold.plan(on_meta(), batch=1, sequence=8)
    path = tmp_path / "machine.json"
    laptop().write(path)
    assert stronghold.plan(on_meta(), machine=path, batch=1, sequence=8).machine == "a processor"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))
    with pytest.raises(ValueError, match="version of the machine file"):
        stronghold.plan(on_meta(), machine=path, batch=1, sequence=8)


def test_beside_a_plan_one_may_say_what_it_says_of_the_optimizer(tmp_path):
    here = laptop(disks={str(tmp_path): dict.fromkeys(DISK, about(1e9))})
    plan = planned(given=here, store=str(tmp_path), window=2, update="in_backward", states="8bit", host_memory="1GiB")
    for known in ({"update": "deferred"}, {"states": "fp32"}):
        with pytest.raises(ValueError, match=f"a plan holds for its own settings .got {next(iter(known))}"):
            stronghold.offload(GPT(CONFIG), device="cpu", plan=replace(plan, machine=processor_name()), **known)
    model = stronghold.offload(
        GPT(CONFIG), device="cpu", plan=replace(plan, machine=processor_name()), update="in_backward", states="8bit"
    )
    stronghold.close(model)

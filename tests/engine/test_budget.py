"""Who gets which memory: how many layers stay on the device and how many pass, and that a budget given is kept."""

import copy
import gc
import re
from bisect import bisect_left
from itertools import pairwise

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import CpuDevice
from stronghold.engine.budget import spread
from stronghold.engine.placement import plan
from stronghold.errors import BudgetError
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.layout import ALIGNMENT_BYTES
from stronghold.settings import OffloadSettings
from stronghold.split import join
from stronghold.unit import grad_meta_of
from stronghold.units import format_bytes
from tests.crossed import crossed
from tests.reference import CASES, offloaded, ordinary, snapshot, train
from tests.small import (
    ADAMW,
    SIZE,
    Block,
    Decoder,
    Frozen,
    Residual,
    assert_unchanged,
    follow,
    numbers,
    ordinary_loop,
    pair,
    words,
)
from tests.small import snapshot as kept
from tests.small_ring import make_the_ring_small


class Uneven(Residual):
    """The first layer is the largest by far, and the third is larger than the rest."""

    def __init__(self):
        super().__init__(layers=5)
        for number, factor in ((0, 8), (2, 4)):
            self.layers[number].up = nn.Linear(SIZE, factor * SIZE)
            self.layers[number].down = nn.Linear(factor * SIZE, SIZE)


class Roomy(CpuDevice):
    """A CPU that says how much is free, and counts what it is asked for."""

    def __init__(self, free=None):
        self.free = free
        self.given = 0
        super().__init__()

    def free_bytes(self):
        return self.free

    def buffer(self, length_bytes):
        self.given += length_bytes
        return super().buffer(length_bytes)

    def device_buffer(self, length_bytes):
        self.given += length_bytes
        return super().device_buffer(length_bytes)


def rows(model):
    """Returns which layers are resident."""
    units = {p._unit.layer: p._unit for layer in model.layers for p in layer.parameters() if p._unit.layer is not None}
    return [index for index, unit in sorted(units.items()) if unit.resident]


def offload(build=Residual, *, device="cpu", **settings):
    torch.manual_seed(0)
    return stronghold.offload(build(), device=device, **settings)


def taken(build, *, states="fp32", **settings):
    """Returns what a model and its optimizer really hold on the device, without any budget."""
    model = offload(build, **settings)
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    held = stronghold.report(model).device_bytes
    del optimizer
    return held


def steps(model, count=3, **settings):
    optimizer = stronghold.AdamW(model.parameters(), **settings)
    dtype = model.out.weight.dtype
    ordinary_loop(model, optimizer, [batch.to(dtype) for batch in numbers(count)])
    return optimizer


@pytest.fixture(autouse=True)
def _memory_of_its_own(monkeypatch):
    monkeypatch.setattr(CpuDevice, "is_host", False)


@pytest.fixture(autouse=True)
def _root_on_the_host(monkeypatch):
    """Shares memory out among layers alone: tests/engine/test_root.py has root parameters."""
    monkeypatch.setattr("stronghold.engine.budget.resident_root", lambda *_: [])


# ---- which layers stay ----


@pytest.mark.parametrize(
    ("layers", "resident", "expected"),
    [
        (8, 3, [0, 2, 5]),
        (8, 0, []),
        (8, 1, [0]),
        (8, 2, [0, 4]),
        (8, 4, [0, 2, 4, 6]),
        (8, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, 7, [0, 1, 2, 3, 4, 5, 6]),
        (5, 2, [0, 2]),
        (5, 3, [0, 1, 3]),
        (7, 3, [0, 2, 4]),
        (32, 5, [0, 6, 12, 19, 25]),
        (2, 1, [0]),
    ],
)
def test_resident_layers_lie_evenly_from_the_first_on(layers, resident, expected):
    assert spread(layers, resident) == expected


def test_there_are_as_many_as_asked_for_and_the_gaps_differ_by_one_at_most():
    for layers in range(1, 40):
        for resident in range(1, layers + 1):
            found = spread(layers, resident)
            assert len(set(found)) == resident and found[0] == 0 and found[-1] < layers
            gaps = [b - a for a, b in pairwise([*found, layers])]
            assert max(gaps) - min(gaps) <= 1, (layers, resident)


@pytest.mark.parametrize("resident", range(5))
def test_a_number_is_taken_at_its_word(resident):
    model = offload(resident=resident, window=1)
    assert rows(model) == spread(4, resident)
    report = stronghold.report(model)
    assert (report.resident, report.window) == (resident, 1 if resident < 4 else 0)


def test_auto_without_a_budget_is_none_where_the_device_does_not_say_what_is_free():
    model = offload(resident="auto")
    assert rows(model) == []
    assert stronghold.report(model).window == 2


@pytest.mark.parametrize(
    ("build", "dtype", "window"),
    crossed([Residual, Uneven, Frozen], [torch.float32, torch.bfloat16], [1, 3, "auto"], together=1),
)
def test_auto_keeps_as_many_as_the_budget_holds_and_not_one_fewer(window, dtype, build):
    """Against what models with every number of resident layers really take, optimizer included."""
    layers = len(build().layers)
    slots = 2 if window == "auto" else window
    needs = {k: taken(build, resident=k, window=slots, dtype=dtype) for k in range(layers + 1)}
    for budget in sorted({need + more for need in needs.values() for more in (-1, 0, 1)}):
        fitting = [k for k, need in needs.items() if need <= budget]
        if not fitting:
            continue  # what cannot fit is refused, which is another test's
        model = offload(build, resident="auto", window=window, dtype=dtype, device_memory=budget)
        assert rows(model) == spread(layers, max(fitting)), budget
        optimizer = stronghold.AdamW(model.parameters())
        assert stronghold.report(model).device_bytes <= budget
        del optimizer


def test_auto_takes_half_of_what_is_free_where_nobody_sets_a_budget():
    """The other half is left to activations, whose size depends on the batch."""
    needs = {k: taken(Residual, resident=k, window=2) for k in range(5)}
    for k, need in needs.items():
        for free, expected in ((2 * need, k), (2 * need + 1, k), (2 * need - 1, max(0, k - 1))):
            model = offload(device=Roomy(free), resident="auto")
            assert stronghold.report(model).resident == expected, free
            assert rows(model) == spread(4, expected)


def test_more_memory_never_keeps_fewer():
    most = taken(Uneven, resident=5)
    found = []
    for budget in range(taken(Uneven, resident=0, window=1), most + 2000, 1997):
        model = offload(Uneven, resident="auto", window=1, device_memory=budget)
        found.append(stronghold.report(model).resident)
    assert found == sorted(found)
    assert set(found) >= {0, 1, 4, 5}


# ---- the window beside them ----


def test_a_slot_is_as_long_as_the_longest_layer_that_passes_through_it():
    alone, beside = (stronghold.report(offload(Uneven, resident=k, window=2)) for k in (0, 1))
    ordinary_layer = stronghold.report(offload(Uneven, resident=3, window=2))
    bytes_of = [sum(4 * p.numel() for p in layer.parameters()) for layer in Uneven().layers]
    for report, longest in ((alone, bytes_of[0]), (beside, bytes_of[2]), (ordinary_layer, bytes_of[2])):
        resident = report.resident
        expected = max(size for row, size in enumerate(bytes_of) if row not in spread(5, resident))
        assert expected == longest or resident == 3
        assert 2 * expected <= report.slots_device_bytes <= 2 * (expected + 6 * ALIGNMENT_BYTES)


def test_the_window_is_no_longer_than_what_passes_through_it():
    for resident in range(5):
        for window in (1, 2, 3, 4):
            model = offload(resident=resident, window=window)
            assert stronghold.report(model).window == min(window, 4 - resident)
    with pytest.raises(ValueError, match=r"window must be between 1 and .* \(got window=5, layers=4\)"):
        offload(resident=3, window=5)


@pytest.mark.parametrize("build", [Residual, Uneven])
@pytest.mark.parametrize("resident", [0, 1, 3])
def test_a_window_that_nobody_chose_takes_half_of_a_budget_and_at_least_one_layer(resident, build):
    """With a number of resident layers; with "auto", which shares the budget out, all of it."""
    layers = len(build().layers)
    needs = {w: taken(build, resident=resident, window=w) for w in range(1, layers - resident + 1)}
    for budget in (needs[1], needs[1] + 1, 2 * needs[1], 2 * max(needs.values()) - 1, 2 * max(needs.values())):
        report = stronghold.report(offload(build, resident=resident, device_memory=budget))
        fitting = [w for w, need in needs.items() if need <= budget // 2]
        assert report.window == max(fitting, default=1), budget


def test_auto_leaves_no_memory_to_a_window_that_could_have_had_it():
    """Between two numbers of resident layers, what is left goes to slots."""
    for resident in range(4):
        needs = {w: taken(Residual, resident=resident, window=w) for w in range(2, 4 - resident + 1)}
        for window, need in needs.items():
            if need < taken(Residual, resident=resident + 1, window=2):
                report = stronghold.report(offload(resident="auto", device_memory=need))
                assert (report.resident, report.window) == (resident, window)


# ---- all of them ----


@pytest.mark.parametrize(
    ("update", "activations"),
    crossed(["deferred", "in_backward"], ["recompute", "keep", "host"], together=1),
)
def test_with_all_layers_resident_it_trains_like_plain_pytorch(update, activations):
    model, _ = follow(Residual, numbers(20), ours_only={"update": update}, resident=4, activations=activations)
    report = stronghold.report(model)
    assert (report.window, report.resident, report.slots_device_bytes, report.gradients_device_bytes) == (0, 4, 0, 0)
    assert (report.step.fetches, report.step.gradient_bytes) == (0, 0)


def test_and_so_does_a_transformer_with_clipping_accumulation_and_decay_groups():
    case = CASES["gpt"]
    batches = case.batches(40)
    loop = {"accumulation": 2, "clip": 0.5, "warmup": 5}
    model, optimizer = offloaded(case, resident=4)
    losses, got = train(model, optimizer, batches, **loop), snapshot(model, optimizer)
    plain, adamw = ordinary(case, foreach=False)
    expected_losses, expected = train(plain, adamw, batches, **loop), snapshot(plain, adamw)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=0.0)
    for name, tensors in expected.items():
        for key, tensor in tensors.items():
            if not name.endswith("qkv.bias"):  # of a key's bias Adam divides rounding by rounding
                torch.testing.assert_close(got[name][key], tensor, rtol=1e-3, atol=1e-5, msg=f"{name} {key}")


def test_with_all_layers_resident_there_is_nothing_of_them_on_the_host():
    model = offload(resident=4)
    optimizer = stronghold.AdamW(model.parameters())
    root = sum(4 * p.numel() for p in (*model.into.parameters(), *model.out.parameters()))
    # Weights, gradients and two moments of the root parameters, a number each, and what alignment takes.
    assert 4 * root <= stronghold.report(model).host_bytes <= 4 * root + 4 * (8 + 4 * ALIGNMENT_BYTES)
    del optimizer


# ---- what is refused ----


def refused(build, message, **settings):
    """Asserts that it is, by ``message``, and that the model is as it was."""
    torch.manual_seed(0)
    model = build()
    before = kept(model)
    objects = [(id(p), type(p)) for p in model.parameters()]
    with pytest.raises(BudgetError, match=message):
        stronghold.offload(model, device="cpu", **settings)
    assert_unchanged(before, model)
    assert [(id(p), type(p)) for p in model.parameters()] == objects
    assert "forward" not in vars(model.layers[0])


def test_resident_layers_that_do_not_fit_are_refused_with_the_numbers():
    needed = taken(Residual, resident=3, window=1) - stronghold.report(offload(resident=3, window=1)).slots_device_bytes
    refused(
        Residual,
        rf"3 resident layers need {needed:,} bytes on the device with the root and gradient slots, .* "
        rf"\(got device_memory={needed - 1:,}\); pass a smaller resident=, or 'auto'",
        resident=3,
        window=1,
        device_memory=needed - 1,
    )
    refused(Residual, "a window of 1 needs .* resident layers take", resident=3, window=1, device_memory=needed)
    refused(Residual, "4 resident layers need", resident=4, device_memory=0)


def test_all_layers_resident_fit_to_the_byte():
    needed = taken(Residual, resident=4)
    refused(Residual, "4 resident layers need", resident=4, device_memory=needed - 1)
    model = offload(resident=4, device_memory=needed)
    optimizer = steps(model)
    assert stronghold.report(model).device_bytes == needed
    assert optimizer.states == "fp32"


@pytest.mark.parametrize("resident", [1, 2, 3])
def test_a_window_beside_resident_layers_is_refused_with_what_would_fit(resident):
    streamed = 4 - resident
    needs = {w: taken(Residual, resident=resident, window=w) for w in range(1, streamed + 1)}
    for window, need in needs.items():
        model = offload(resident=resident, window=window, device_memory=need)
        assert stronghold.report(model).window == window
        hint = f"pass window={window - 1} or less" if window > 1 else "not even a window of 1 fits"
        refused(
            Residual,
            f"a window of {window} needs .* root, gradient slots and resident layers take .*{hint}",
            resident=resident,
            window=window,
            device_memory=need - 1,
        )


def test_auto_refuses_what_not_even_a_streamed_model_fits():
    needed = taken(Residual, resident=0, window=1)
    for window in (1, "auto"):
        refused(Residual, "a window of 1", resident="auto", window=window, device_memory=needed - 1)
    model = offload(resident="auto", window=1, device_memory=needed)
    assert stronghold.report(model).resident == 0


def test_layers_unfrozen_after_offload_are_refused_by_the_optimizer_where_their_states_do_not_fit():
    """Frozen, they take neither gradients nor states; that AdamW is made later is when it shows."""

    def build():
        model = Residual()
        model.layers.requires_grad_(False)
        return model

    budget = taken(build, resident=4)
    model = offload(build, resident=4, device_memory=budget)
    model.layers.requires_grad_(True)
    before, held = kept(model), stronghold.report(model).device_bytes
    for states in ("fp32", "8bit"):
        with pytest.raises(BudgetError, match=r"AdamW, its states and gradients, takes .* raise device_memory"):
            stronghold.AdamW(model.parameters(), states=states)
    assert_unchanged(before, model)
    assert stronghold.report(model).device_bytes == held, "nothing was taken"
    model.layers.requires_grad_(False)
    optimizer = steps(model)
    assert stronghold.report(model).device_bytes <= budget
    assert len(optimizer.state_dict()["state"]) == 4


def test_resident_layers_do_not_count_on_the_host():
    budget = stronghold.report(offload(resident=4)).host_bytes
    with pytest.raises(BudgetError, match="host memory must hold"):
        offload(host_memory=2 * budget)
    model = offload(resident=4, host_memory=5 * budget)
    optimizer = steps(model)
    assert budget < stronghold.report(model).host_bytes <= 5 * budget
    del optimizer


def test_a_budget_that_lacks_a_byte_is_told_in_bytes():
    """Both numbers were rounded to the same text: what is needed, and what was given."""

    def told(budget):
        try:
            offload(host_memory=budget)
        except BudgetError as error:
            return str(error)
        return ""

    least = bisect_left(range(2**20), True, key=lambda budget: "host memory must hold" not in told(budget))
    assert f"host memory must hold {least:,} bytes (got host_memory={least - 1:,}): weights" in told(least - 1)
    assert f"host memory must hold {format_bytes(least)} (got host_memory=1.00 KiB): weights" in told(1024)


# ---- what is kept ----


@pytest.mark.parametrize(
    ("build", "dtype", "update", "states"),
    crossed(
        [Residual, Uneven],
        [torch.float32, torch.bfloat16],
        ["deferred", "in_backward"],
        ["fp32", "8bit"],
        together=1,
    ),
)
def test_a_device_budget_is_kept_before_and_after_the_first_step(build, dtype, update, states):
    layers = len(build().layers)
    for resident in (0, 1, layers - 1, layers, "auto"):
        budget = taken(build, resident=layers - 2 if resident == "auto" else resident, window=1, dtype=dtype)
        model = offload(build, resident=resident, window=1, dtype=dtype, device_memory=budget)
        assert stronghold.report(model).device_bytes <= budget
        optimizer = stronghold.AdamW(model.parameters(), update=update, states=states)
        made = stronghold.report(model).device_bytes
        assert made <= budget
        reckoned = (states, update) == ("fp32", "deferred") or (states == "fp32" and resident == 0)
        assert made == budget or not reckoned, "states in fp32, and gradients that stay, are what was reckoned with"
        ordinary_loop(model, optimizer, [batch.to(dtype) for batch in numbers(3)])
        assert stronghold.report(model).device_bytes == made
        with torch.no_grad():
            model(numbers(1)[0].to(dtype))
        assert stronghold.report(model).device_bytes == made


@pytest.mark.parametrize("resident", [0, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_counted_is_what_was_allocated(dtype, resident):
    device = Roomy()
    model = offload(device=device, resident=resident, window=1, dtype=dtype)
    optimizer = steps(model)
    report = stronghold.report(model)
    root = [*model.into.parameters(), *model.out.parameters()]
    assert report.root_device_bytes == 2 * sum(p.numel() * p.element_size() for p in root)
    gradients = sum(p.numel() * p.element_size() for i in rows(model) for p in model.layers[i].parameters())
    counted = report.device_bytes - report.root_device_bytes - device.given
    # Gradients of resident layers are autograd's own: counted with their squares, each aligned, and not allocated here.
    assert gradients <= counted <= gradients + 12 * ALIGNMENT_BYTES * resident
    optimizer.zero_grad()


def test_an_optimizer_that_is_gone_gives_its_memory_back():
    model = offload(resident=2, device_memory=taken(Residual, resident=2))
    before = stronghold.report(model)
    for states in ("fp32", "8bit", "fp32"):
        optimizer = steps(model, states=states)
        assert stronghold.report(model).device_bytes > before.device_bytes
        del optimizer
        gc.collect()
        assert stronghold.report(model).device_bytes == before.device_bytes
        assert stronghold.report(model).states is None


def total(parameter):
    known = grad_meta_of(parameter.grad)
    with torch._C.DisableTorchFunctionSubclass():
        shown = parameter.grad.detach().clone()
    return shown.float() if known is None or known.remainder is None else join(shown, known.remainder)


@pytest.mark.parametrize("resident", [0, 2])
def test_a_budget_of_a_loop_that_accumulates_has_room_for_its_sums(resident):
    settings = {"resident": resident, "window": 1, "dtype": torch.bfloat16}
    without = taken(Residual, **settings)
    needed = {}
    for accumulate in (None, 1, 2, 7):
        with pytest.raises(BudgetError) as refused:
            offload(**settings, device_memory=1, accumulate=accumulate)
        needed[accumulate] = re.search(r"need.*? ([\d,.]+ \w+) on the device", str(refused.value)).group(1)
    assert needed[None] == needed[1] != needed[2] == needed[7]
    for accumulate, room in ((1, without), (2, with_sums(**settings))):
        model = offload(**settings, device_memory=room, accumulate=accumulate)
        optimizer = stronghold.AdamW(model.parameters())
        for _ in range(2):
            for batch in numbers(accumulate):
                model(batch.bfloat16()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert stronghold.report(model).device_bytes == room
        assert stronghold.report(model).step.passes == accumulate


def with_sums(**settings):
    """Returns what a model and its optimizer really hold on the device once two gradients have been added up."""
    model = offload(**settings)
    optimizer = stronghold.AdamW(model.parameters())
    for batch in numbers(2):
        model(batch.bfloat16()).sum().backward()
    held = stronghold.report(model).device_bytes
    optimizer.zero_grad()
    return held


def test_a_host_budget_leaves_room_for_sums_or_refuses(tmp_path):
    settings = {"window": 1, "dtype": torch.bfloat16}
    model = offload(**settings)
    optimizer = stronghold.AdamW(model.parameters())
    room, sums = stronghold.report(model).host_bytes, stronghold.report(model).accumulation_bytes
    del optimizer
    for accumulate, host_memory in ((1, room), (2, room + sums)):
        model = offload(**settings, accumulate=accumulate, host_memory=host_memory)
        optimizer = stronghold.AdamW(model.parameters())
        for batch in numbers(accumulate):
            model(batch.bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = offload(**settings, accumulate=2, host_memory=room)
    with pytest.raises(BudgetError, match="its states and gradients"):
        stronghold.AdamW(model.parameters())
    with pytest.raises(BudgetError, match="with states='8bit'; raise host_memory"):
        offload(**settings, accumulate=2, host_memory=100)


def test_beside_a_disk_room_is_left_for_sums_in_ram(tmp_path, monkeypatch):
    make_the_ring_small(monkeypatch)
    settings = {"window": 1, "dtype": torch.bfloat16, "store": str(tmp_path)}
    first, second = (batch.bfloat16() for batch in numbers(2))

    def trained(accumulate, host_memory):
        model = offload(**settings, accumulate=accumulate, host_memory=host_memory)
        try:
            optimizer = stronghold.AdamW(model.parameters())
            for batch in (first, second)[:accumulate]:
                model(batch).sum().backward()
            optimizer.step()
            return stronghold.report(model)
        finally:
            stronghold.close(model)

    in_ram = trained(1, "1GiB")
    assert in_ram.weights_on_disk == in_ram.states_on_disk == 0
    rooms = range(in_ram.host_bytes, 2 * in_ram.host_bytes, 2**12)
    room = next(room for room in rooms if trained(1, room).states_on_disk == 0)
    beside = trained(2, room)
    assert beside.host_bytes <= room
    assert beside.states_on_disk + beside.weights_on_disk > 0


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_batches_of_a_step_that_cannot_be(accumulate):
    with pytest.raises(ValueError, match=r"accumulate must be a number of batches, 1 or more \(got"):
        offload(accumulate=accumulate)


@pytest.mark.parametrize(
    "resident", [pytest.param(0, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_sums_that_do_not_fit_the_device_are_refused_and_lose_no_gradient(resident):
    """A second backward pass in bf16 needs 2 bytes per parameter more, of root parameters and of resident layers."""
    budget = taken(Residual, resident=resident, window=1, dtype=torch.bfloat16)
    model = offload(resident=resident, window=1, dtype=torch.bfloat16, device_memory=budget).eval()
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    assert stronghold.report(model).accumulation_bytes > 0
    first, second = (batch.bfloat16() for batch in numbers(2))
    model(first).sum().backward()
    before = {name: total(p) for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"adding up several gradients of .* in fp32, 2 bytes per parameter"):
            model(second).sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert torch.equal(total(parameter), before[name]), name
    assert stronghold.report(model).device_bytes <= budget
    _, twin = pair(Residual, dtype=torch.bfloat16, resident=resident, window=1)
    twin.eval()
    other = stronghold.AdamW(twin.parameters(), **ADAMW)
    twin(first).sum().backward()
    for each in (optimizer, other):
        each.step()
        each.zero_grad()
    for one, each in ((model, optimizer), (twin, other)):
        ordinary_loop(one, each, [second])
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(parameter, expected), name


# ---- the plan itself ----


def test_planning_marks_layers_and_changes_nothing_else():
    model = Uneven()
    before = [(id(p), p.data_ptr(), type(p), p._version) for p in model.parameters()]
    settings = OffloadSettings(resident=2, window=3)
    placement = plan(model, None, None, settings, CpuDevice())
    assert [unit.resident for unit in placement.layers] == [True, False, True, False, False]
    assert not any(unit.resident for unit, _ in placement.root)
    assert placement.window == 3
    assert [(id(p), p.data_ptr(), type(p), p._version) for p in model.parameters()] == before


def test_tied_root_parameters_are_counted_once():
    model = offload(Decoder, resident=1)
    report = stronghold.report(model)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    assert report.root_device_bytes == 2 * 4 * model.words.weight.numel() + buffers
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    ordinary_loop(model, optimizer, words(2))
    assert copy.deepcopy(report.device_bytes) < stronghold.report(model).device_bytes


def test_layers_without_elements_are_no_hindrance():
    class Empty(Block):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0, SIZE))

    needed = taken(lambda: Residual(block=Empty), resident=4)
    model = offload(lambda: Residual(block=Empty), resident="auto", device_memory=needed)
    assert stronghold.report(model).resident == 4
    steps(model)


def test_an_optimizer_other_than_offload_was_told_of_is_refused_with_both(tmp_path):
    """Where it does not fit; ``"auto"`` is the one that was told."""
    config = GPTConfig(layers=6, hidden=768, heads=4, sequence=8, vocabulary=100)
    told = {"update": "in_backward", "states": "8bit"}
    settings = {"device": "cpu", "window": 1, "store": str(tmp_path), "host_memory": "360MiB"}
    model = stronghold.offload(GPT(config), **settings, **told)
    with pytest.raises(
        BudgetError, match=r"as offload\(\) was told \(update='in_backward', states='8bit'\), or tell it"
    ):
        stronghold.AdamW(model.parameters())
    optimizer = stronghold.AdamW(model.parameters(), update="auto", states="8bit")
    assert optimizer.in_backward
    assert stronghold.report(model).host_bytes <= 360 * 2**20
    stronghold.close(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"update": "auto"}, "update must be 'deferred' or 'in_backward'"),
        ({"states": "4bit"}, "states must be 'fp32' or '8bit'"),
        ({"update": "in_backward", "accumulate": 2}, r"in every backward pass \(got accumulate=2\)"),
    ],
)
def test_what_cannot_be_known_of_an_optimizer(settings, message):
    with pytest.raises(ValueError, match=message):
        offload(**settings)

"""What ``offload`` refuses, each with the rule, the values and the remedy, and before anything has changed."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import stronghold
from stronghold.device import CpuDevice
from stronghold.errors import BudgetError, OffloadedModelError
from tests.crossed import crossed
from tests.small import (
    ADAMW,
    SIZE,
    Block,
    Decoder,
    Residual,
    assert_close,
    assert_unchanged,
    follow,
    numbers,
    ordinary_loop,
    pair,
    snapshot,
)


def assert_refused(model, error, message, **settings):
    """The model is as it was: its parameters are the same objects with the same values, and it computes."""
    before = snapshot(model)
    objects = [(id(p), type(p), p.dtype) for p in model.parameters()]
    with pytest.raises(error, match=message):
        stronghold.offload(model, **{"device": "cpu", **settings})
    assert [(id(p), type(p), p.dtype) for p in model.parameters()] == objects
    assert_unchanged(before, model)
    assert "forward" not in vars(next(iter(model.children()), model))


class Albert(nn.Module):
    """One block, run again and again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block()])

    def forward(self, x):
        for _ in range(4):
            x = self.layers[0](x)
        return x.square().mean()


class SharedAlbert(Albert):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 4)


def test_a_model_without_a_repeated_block():
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.LayerNorm(SIZE))
    assert_refused(model, ValueError, "Sequential has no repeated block.* name the container")
    assert_refused(nn.Linear(3, 3), ValueError, "Linear has no repeated block")
    assert_refused(nn.ModuleList([nn.ReLU(), nn.ReLU()]), ValueError, "no repeated block")


def test_one_block_that_is_used_again_and_again():
    assert_refused(Albert(), ValueError, "no repeated block")
    for layers in (None, "layers"):
        assert_refused(SharedAlbert(), ValueError, "repeated block|at least two layers", layers=layers)


def test_layers_that_share_all_their_parameters():
    class Tied(Residual):
        def __init__(self):
            super().__init__()
            for layer in self.layers[1:]:
                for name, module in layer.named_modules():
                    for key in module._parameters:
                        setattr(module, key, self.layers[0].get_submodule(name)._parameters[key])

    assert_refused(Tied(), ValueError, "there is nothing to offload")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("model.layers", r"'model.layers', which names no module.*'layers'"),
        ("into", "'into', which names a Linear"),
        (["layers", "nothing"], "'nothing', which names no module"),
        ([], "at least one container"),
        ("", "'', which names a Residual"),
        (["layers", "layers.1.parts"], "'layers.1.parts', which names no module"),
    ],
)
def test_layers_that_name_none(layers, message):
    assert_refused(Residual(), ValueError, message, layers=layers)


def test_containers_within_one_another():
    model = Residual(block=lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)))
    assert_refused(model, ValueError, "'layers' and 'layers.1' inside it", layers=["layers", "layers.1"])
    assert_refused(nn.Sequential(model.layers[0], nn.Linear(3, 3)), ValueError, "inside it", layers=["", "0"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, r"window must be between 1 and .* \(got window=0, layers=4\)"),
        ({"window": 5}, r"\(got window=5, layers=4\)"),
        ({"window": -1}, "got window=-1"),
        ({"window": 2.0}, "window must be a number of layers or 'auto'"),
        ({"window": True}, "window must be a number of layers or 'auto'"),
        ({"window": "all"}, "window must be a number of layers or 'auto'"),
        ({"store": 3}, "store must be 'ram', the path of a directory"),
        ({"micro_batch": 0}, "micro_batch must be a number of samples, 1 or more"),
        ({"micro_batch": True}, "micro_batch must be a number of samples"),
        ({"micro_batch": 1.5}, "micro_batch must be a number of samples"),
        ({"activations": "drop"}, "activations must be 'recompute', 'keep', 'host', 'disk', a number of layers"),
        ({"resident": -1}, "resident must be a number of layers, 0 or more, or 'auto'"),
        ({"resident": "all"}, "resident must be a number of layers"),
        ({"resident": True}, "resident must be a number of layers"),
        ({"resident": 5}, r"resident must be between 0 and the number of layers \(got resident=5, layers=4\)"),
        ({"device_memory": "lots"}, "a size must be one number and one unit"),
        ({"device_memory": -1}, "a size must not be negative"),
        ({"host_memory": "3 potatoes"}, "a size's unit"),
        ({"host_memory": 1.5}, "a size must be"),
        ({"dtype": torch.float16}, r"dtype must be torch.float32 or torch.bfloat16 \(got torch.float16\)"),
        ({"dtype": torch.float64}, "got torch.float64"),
        ({"device": "mps"}, "device must be 'cpu', 'cuda"),
        ({"device": "meta"}, "device must be 'cpu', 'cuda"),
    ],
)
def test_settings_out_of_range(settings, message):
    assert_refused(Residual(), ValueError, message, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there():
    assert_refused(Residual(), ValueError, "needs a CUDA device", device="cuda")


def test_a_device_budget_that_cannot_hold_the_window():
    report = stronghold.report(stronghold.offload(Residual(), device="cpu", window=3))
    slot, needed = report.slots_device_bytes // 3, report.device_bytes
    assert_refused(Residual(), BudgetError, "pass window=2 or less", window=3, device_memory=needed - 1)
    assert_refused(
        Residual(), BudgetError, "not even a window of 1 fits", window=3, device_memory=needed - 2 * slot - 1
    )
    for budget in (needed - 2 * slot - 1, 0):
        assert_refused(Residual(), BudgetError, "a window of 1 needs", device_memory=budget)
    model = stronghold.offload(Residual(), device="cpu", window=3, device_memory=needed)
    assert stronghold.report(model).device_bytes == needed
    # "auto" leaves half of the budget to activations, but never takes less than one layer.
    for budget in (needed - 2 * slot, 2 * needed, 2 * needed - 1, 100 * needed):
        report = stronghold.report(stronghold.offload(Residual(), device="cpu", device_memory=budget))
        assert report.device_bytes <= budget
        assert report.window == {2 * needed: 3, 100 * needed: 4}.get(budget, 1 if budget < needed else 2)


@pytest.fixture
def apart(monkeypatch):
    """Lets the device have memory of its own, where root parameters are copies and layers need slots."""
    monkeypatch.setattr(CpuDevice, "is_host", False)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(("dtype", "states"), crossed([None, torch.bfloat16], ["fp32", "8bit"], together=1))
def test_a_host_budget_that_cannot_hold_weights_gradients_and_states(dtype, states):
    model = stronghold.offload(Residual(), device="cpu", window=2, dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    first = stronghold.report(model).host_bytes
    ordinary_loop(model, optimizer, [b.to(dtype or torch.float32) for b in numbers(2)])
    assert stronghold.report(model).host_bytes == first, "all is taken before the first step"
    model = stronghold.offload(Residual(), device="cpu", window=2, host_memory=first - 1, dtype=dtype)
    held = stronghold.report(model).host_bytes
    with pytest.raises(BudgetError, match=r"AdamW, its states and gradients, takes .* raise host_memory"):
        stronghold.AdamW(model.parameters(), states=states)
    assert stronghold.report(model).host_bytes == held, "nothing was taken"
    model = stronghold.offload(Residual(), device="cpu", window=2, host_memory=first, dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), states=states)
    ordinary_loop(model, optimizer, [b.to(dtype or torch.float32) for b in numbers(2)])


@pytest.mark.usefixtures("apart")
def test_a_host_budget_that_cannot_hold_the_smallest_optimizer():
    model = stronghold.offload(Residual(), device="cpu")
    optimizer = stronghold.AdamW(model.parameters(), states="8bit", update="in_backward")
    assert stronghold.report(model).states == optimizer.states
    smallest = stronghold.report(model).host_bytes
    assert_refused(Residual(), BudgetError, "weights .* gradients .* states", host_memory=smallest - 1)
    model = stronghold.offload(Residual(), device="cpu", host_memory=smallest)
    stronghold.AdamW(model.parameters(), states="8bit", update="in_backward")


@pytest.mark.usefixtures("apart")
def test_sums_of_gradients_are_told_beforehand_and_kept_to_the_budget():
    def accumulate(model, optimizer, batches):
        for batch in batches:
            model(batch.bfloat16()).sum().backward()
        optimizer.step()

    model = stronghold.offload(Residual(), device="cpu", window=2, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters())
    before = stronghold.report(model)
    accumulate(model, optimizer, numbers(3))
    after = stronghold.report(model)
    taken = after.host_bytes + after.device_bytes - before.host_bytes - before.device_bytes
    root = sum(unit.gradients.sum_bytes() for unit in model.out.weight._unit.owner.units if unit.is_root)
    assert taken == before.accumulation_bytes + root, "a root parameter's sum arrives on the host too"
    assert str(before.accumulation_bytes // 1024) in str(before)
    model = stronghold.offload(Residual(), device="cpu", window=2, dtype=torch.bfloat16, host_memory=before.host_bytes)
    optimizer = stronghold.AdamW(model.parameters())
    with pytest.raises(BudgetError, match=r"adding up several gradients .* in fp32, 2 bytes per parameter"):
        accumulate(model, optimizer, numbers(3))


def test_a_model_can_be_offloaded_once():
    _, model = pair(Residual)
    for again in (model, nn.ModuleDict({"inner": model}), model.layers):
        with pytest.raises(OffloadedModelError, match="is offloaded already"):
            stronghold.offload(again, device="cpu")
    assert_close(model.layers[0].up.weight, follow_once().layers[0].up.weight)


def follow_once():
    return pair(Residual)[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_parameters_of_another_dtype(dtype):
    model = Residual()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    objects = [(id(p), p.dtype) for p in model.parameters()]
    with pytest.raises(ValueError, match=f"must be float32 or bfloat16 .*{dtype}.*pass dtype="):
        stronghold.offload(model, device="cpu")
    assert [(id(p), p.dtype) for p in model.parameters()] == objects


def test_parameters_of_another_dtype_are_converted_on_request():
    for given in (torch.float16, torch.float64):
        model = Residual().to(given)
        expected = {name: value.float() for name, value in model.state_dict().items()}
        model = stronghold.offload(model, device="cpu", dtype=torch.float32)
        assert_close(dict(model.state_dict()), expected, rtol=0, atol=0)
        ordinary_loop(model, stronghold.AdamW(model.parameters()), numbers(2))


def test_layers_of_one_dtype_each():
    """They need not agree with one another."""

    class Cast(Residual):
        def __init__(self):
            super().__init__()
            self.layers[1].bfloat16()

        def features(self, x):
            x = self.into(x)
            for layer in self.layers:
                x = layer(x.to(layer.up.weight.dtype)).float()
            return self.out(x)

    plain, model = pair(Cast)
    plain.eval()
    model.eval()
    for batch in numbers(2):
        assert_close(model(batch), plain(batch))


def test_parameters_without_values():
    with torch.device("meta"):
        model = Residual()
    with pytest.raises(ValueError, match=r"must have values .* meta device"):
        stronghold.offload(model, device="cpu")


def test_a_move_changes_nothing_or_is_refused():
    _, model = pair(Decoder)
    before = snapshot(model)
    assert model.to("cpu") is model
    assert model.cpu() is model
    assert model.float() is model
    for move in (
        lambda: model.to(torch.bfloat16),
        lambda: model.half(),
        lambda: model.double(),
        lambda: model.layers[0].bfloat16(),
        lambda: model.layers[0].up.half() if hasattr(model.layers[0], "up") else model.layers[0].query.half(),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="meta"),
    ):
        with pytest.raises(OffloadedModelError, match="build it anew and pass device= and dtype="):
            move()
    assert_unchanged(before, model)


@pytest.mark.parametrize("resident", [0, 3])
def test_buffers_get_the_type_that_is_asked_for_as_in_any_module(resident):
    def build():
        model = Decoder()
        model.register_buffer("scale", torch.full((), 1 / 3, dtype=torch.float64))
        model.layers[1].register_buffer("shift", torch.full((3,), 1 / 3, dtype=torch.bfloat16))
        model.layers[1].register_buffer("counted", torch.arange(3))
        model.layers[1].register_buffer("nothing", None)
        return model

    plain, model = pair(build, resident=resident, window=1)
    for call in (lambda m: m.to("cpu"), lambda m: m.layers.float(), lambda m: m.float()):
        plain, model = call(plain), call(model)
        expected = [(name, b.dtype, b.tolist()) for name, b in plain.named_buffers()]
        assert [(name, b.dtype, b.tolist()) for name, b in model.named_buffers()] == expected


def test_a_replica_for_data_parallel_is_refused():
    _, model = pair(Decoder)
    wrapped = nn.Sequential(model)
    for module in (model, model.layers[0]):
        with pytest.raises(OffloadedModelError, match=r"on one device .*DataParallel.*CUDA_VISIBLE_DEVICES=0"):
            module._replicate_for_data_parallel()
    assert wrapped._replicate_for_data_parallel()[0] is model
    assert copy.deepcopy(model)._replicate_for_data_parallel()._is_replica  # an ordinary model
    layer = model.layers[0]
    stronghold.close(model)
    assert layer._replicate_for_data_parallel()._is_replica  # another model may have it now


def replaced_in_a_layer(model):
    model.layers[1].up.weight = nn.Parameter(torch.zeros(2 * SIZE, SIZE))


def replaced_by_assignment(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def replaced_root(model):
    model.out.weight = nn.Parameter(torch.zeros(3, SIZE))


def added_to_a_layer(model):
    model.layers[2].scale = nn.Parameter(torch.ones(SIZE))


def module_added_to_a_layer(model):
    model.layers[2].up.adapter = nn.Linear(SIZE, SIZE)


def module_replaced_in_a_layer(model):
    model.layers[0].up = nn.Linear(SIZE, 2 * SIZE)


def removed_from_a_layer(model):
    model.layers[3].up.register_parameter("bias", None)


CHANGES = [
    replaced_in_a_layer,
    replaced_by_assignment,
    replaced_root,
    module_replaced_in_a_layer,
    removed_from_a_layer,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_parameter_replaced_or_removed_after_offload(change):
    model, optimizer = follow(Residual, numbers(2))
    before = copy.deepcopy(optimizer.state_dict())
    change(model)
    for training in (True, False):
        with (
            torch.set_grad_enabled(training),
            pytest.raises(OffloadedModelError, match=r"was replaced after offload|\(got: layers\.\d\.[\w.]+ "),
        ):
            model(numbers(1)[0])
    assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("change", [added_to_a_layer, module_added_to_a_layer], ids=lambda change: change.__name__)
def test_a_parameter_added_after_offload_leaves_the_others_as_they_were(change):
    """What it learns is in test_taking_in.py."""
    model, optimizer = follow(Residual, numbers(2))
    before, expected = copy.deepcopy(optimizer.state_dict()), model.eval()(numbers(1)[0])
    change(model)
    assert_close(model(numbers(1)[0]), expected, rtol=0, atol=0)
    assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_a_parameter_added_beside_the_layers_is_updated():
    _, model = pair(Residual)
    model.extra = nn.Linear(SIZE, SIZE)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    before = model.extra.weight.detach().clone()
    (model(numbers(1)[0]).sum() + model.extra(torch.ones(SIZE)).sum()).backward()
    optimizer.step()
    assert not torch.equal(model.extra.weight, before)


def test_a_layer_replaced_after_offload():
    """It would run outside the window, with parameters that nobody updates."""
    _, model = pair(Residual)
    model.layers[2] = Block()
    replaced = r"\(got: layers\.2 was another module and is tests\.small\.Block\)"
    with pytest.raises(OffloadedModelError, match=replaced):
        model(numbers(1)[0])


def test_data_of_another_shape():
    _, model = pair(Residual)
    before = snapshot(model)
    for value in (torch.zeros(3), model.out.weight.data.double()):
        for parameter in (model.layers[0].up.weight, model.out.weight):
            with pytest.raises(OffloadedModelError, match="keeps its shape and dtype"):
                parameter.data = value
    assert_unchanged(before, model)


def test_a_layer_that_writes_its_own_parameters():
    class Writing(Block):
        def forward(self, x):
            with torch.no_grad():
                self.up.weight.mul_(0.5)
            return super().forward(x)

    _, model = pair(lambda: Residual(block=Writing))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OffloadedModelError, match="changed one of its own parameters in place"):
        model(numbers(1)[0])
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_an_error_in_a_layer_leaves_the_model_usable():
    class Picky(Block):
        def forward(self, x):
            if x.isnan().any():
                raise ArithmeticError("the user's")
            return super().forward(x)

    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            for training in (True, False):
                with pytest.raises(ArithmeticError), torch.set_grad_enabled(training):
                    model(batch * float("nan"))
            losses += ordinary_loop(model, optimizer, [batch])
        return losses

    for window in (1, 2, 4):
        follow(lambda: Residual(block=Picky), numbers(3), loop, window=window)


@pytest.mark.parametrize(
    "activations",
    [pytest.param("recompute", marks=pytest.mark.long), pytest.param("keep", marks=pytest.mark.long), "host"],
)
def test_a_model_that_nobody_uses_gives_its_memory_and_its_threads_back(activations):
    def train():
        _, model = pair(Residual, activations=activations)
        optimizer = stronghold.AdamW(model.parameters())
        ordinary_loop(model, optimizer, numbers(2))
        optimizer.wait()
        return weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.out.weight._unit.buffer)

    before = threading.active_count()
    left = [reference for _ in range(3) for reference in train()]
    for _ in range(50):
        gc.collect()
        if threading.active_count() <= before and not any(reference() is not None for reference in left):
            break
        time.sleep(0.05)
    assert [reference() for reference in left] == [None] * len(left)
    assert threading.active_count() <= before


def test_report_needs_an_offloaded_model():
    with pytest.raises(OffloadedModelError, match=r"call stronghold.offload"):
        stronghold.report(Residual())


@pytest.mark.usefixtures("apart")
def test_report_counts_what_there_is():
    _, model = pair(Residual, window=3)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    report = stronghold.report(model)
    assert report.parameters == report.trainable_parameters == sum(p.numel() for p in model.parameters())
    assert (report.layers, report.window, report.device, report.dtype) == (4, 3, "cpu", "float32")
    assert report.step is None
    layer = sum(p.numel() for p in model.layers[0].parameters()) * 4
    assert 3 * layer <= report.slots_device_bytes <= 3 * (layer + 6 * 64)
    root = [*model.into.parameters(), *model.out.parameters()]
    assert report.root_device_bytes == 2 * 4 * sum(p.numel() for p in root), "weights, and gradients beside them"
    ordinary_loop(model, optimizer, numbers(3))
    step = stronghold.report(model).step
    assert step.fetches == 2 * 4 - 3
    assert step.fetched_bytes == 5 * report.slots_device_bytes // 3
    assert 4 * layer <= step.gradient_bytes <= 4 * (layer + 6 * 64)
    assert step.total_s > 0
    assert stronghold.report(model).device_bytes == report.device_bytes
    assert str(stronghold.report(model))

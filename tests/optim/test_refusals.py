"""What the optimizer refuses: clearly, and before anything has changed; and what it must not lose in silence."""

import copy
import errno
import gc
import mmap
import os
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import stronghold
from stronghold import native
from stronghold.engine import engine_of
from stronghold.errors import BudgetError, OffloadedModelError
from stronghold.native import Addition, Segment
from stronghold.unit import OffloadedParameter
from tests.reference import snapshot
from tests.small import (
    ADAMW,
    SIZE,
    Block,
    Frozen,
    Residual,
    assert_close,
    assert_same_models,
    assert_same_states,
    assert_unchanged,
    numbers,
    ordinary_loop,
    pair,
)
from tests.small import snapshot as kept

STATES = pytest.mark.parametrize("states", ["fp32", "8bit"])
RESIDENT = pytest.mark.parametrize("resident", [0, 2])


def groups(model):
    return [{"params": model.layers.parameters(), "lr": 3e-2}, {"params": model.out.parameters(), "weight_decay": 0.3}]


def trained(*, states="fp32", resident=0, steps=2, **settings):
    _, model = pair(Residual, resident=resident, **settings)
    optimizer = stronghold.AdamW(groups(model), **ADAMW, states=states)
    ordinary_loop(model, optimizer, numbers(steps))
    return model, optimizer


def assert_all_the_same(before, model, optimizer):
    """Weights, codes or moments, masters, steps and groups."""
    now = snapshot(model, optimizer)
    assert {name: list(tensors) for name, tensors in now.items()} == {n: list(t) for n, t in before[0].items()}
    for name, tensors in now.items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, before[0][name][key]), (name, key)
    assert_close(optimizer.state_dict(), before[1], rtol=0.0, atol=0.0)


def everything(model, optimizer):
    return snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict())


# ---- state dictionaries ----


def entry(number=1, **entries):
    def change(saved):
        saved["state"][number].update(entries)

    return change


def group(**entries):
    def change(saved):
        saved["param_groups"][0].update(entries)

    return change


def replace_state(value):
    def change(saved):
        saved["state"][1] = value

    return change


def moment(name, value, dtype=torch.float32):
    def change(saved):
        values = saved["state"][2][name].to(dtype)
        values.view(-1)[-1] = value
        saved["state"][2][name] = values

    return change


def shape_of(saved, number):
    return saved["state"][number]["exp_avg"].shape


BAD = {
    "a transposed moment": lambda s: entry(2, exp_avg=torch.zeros(shape_of(s, 2)[::-1]))(s),
    "a flat moment": lambda s: entry(2, exp_avg_sq=torch.zeros(shape_of(s, 2).numel()))(s),
    "a longer moment": entry(0, exp_avg=torch.zeros(SIZE + 1)),
    "a number for a moment": entry(0, exp_avg=torch.zeros(())),
    "whole numbers": entry(0, exp_avg=torch.zeros(SIZE, dtype=torch.int32)),
    "bytes": entry(0, exp_avg_sq=torch.zeros(SIZE, dtype=torch.uint8)),
    "truth values": entry(0, exp_avg=torch.zeros(SIZE, dtype=torch.bool)),
    "complex numbers": entry(0, exp_avg=torch.zeros(SIZE, dtype=torch.complex64)),
    "a list for a moment": entry(0, exp_avg=[0.0] * SIZE),
    "nothing for a moment": entry(0, exp_avg=None),
    "a moment without values": entry(23, exp_avg=torch.zeros(SIZE, device="meta")),
    "a sparse moment": entry(0, exp_avg=torch.zeros(SIZE).to_sparse()),
    "nothing for a state": replace_state(None),
    "a tensor for a state": replace_state(torch.zeros(SIZE)),
    "a list for a state": replace_state([]),
    "no entries": replace_state({}),
    "momentum, as of SGD": replace_state({"momentum_buffer": torch.zeros(SIZE)}),
    "one moment too few": lambda s: s["state"][0].pop("exp_avg_sq"),
    "a step too few": lambda s: s["state"][0].pop("step"),
    "an entry of another optimizer": entry(0, max_exp_avg_sq=torch.zeros(SIZE)),
    "nothing for a step": entry(0, step=None),
    "text for a step": entry(0, step="three"),
    "a step before the first": entry(0, step=-1),
    "no number for a step": entry(0, step=float("nan")),
    "an endless step": entry(0, step=float("inf")),
    "a step that the kernel cannot count": entry(0, step=torch.tensor(1e20)),
    "half a step": entry(0, step=1.5),
    "two numbers for a step": entry(0, step=torch.zeros(2)),
    "NaN in a moment": moment("exp_avg", torch.nan),
    "infinity in a moment": moment("exp_avg", -torch.inf),
    "NaN in a second moment": moment("exp_avg_sq", torch.nan),
    "a negative second moment": moment("exp_avg_sq", -1e-30),
    "NaN in a half": moment("exp_avg_sq", torch.nan, torch.bfloat16),
    "a moment too large for fp32": moment("exp_avg", 1e39, torch.float64),
    "a group too few": lambda s: s["param_groups"].pop(),
    "a group too many": lambda s: s["param_groups"].append(copy.deepcopy(s["param_groups"][0])),
    "a parameter that is there twice": lambda s: s["param_groups"][1]["params"].__setitem__(1, 0),
    "a list for a parameter": lambda s: s["param_groups"][1]["params"].__setitem__(0, [0]),
    "a parameter too few": lambda s: s["param_groups"][0]["params"].pop(),
    "a parameter too many": lambda s: s["param_groups"][1]["params"].append(77),
    "groups of other lengths": lambda s: s["param_groups"][1]["params"].append(s["param_groups"][0]["params"].pop()),
    "a group without parameters": lambda s: s["param_groups"][0].pop("params"),
    "nothing for a group": lambda s: s["param_groups"].__setitem__(0, None),
    "a state of nobody's": lambda s: s["state"].update({99: s["state"][0]}),
    "text for a learning rate": group(lr="fast"),
    "nothing for a learning rate": group(lr=None),
    "a learning rate that is no number": group(lr=float("nan")),
    "one beta": group(betas=(0.9,)),
    "text for a beta": group(betas=("0.9", "0.999")),
    "a beta of one": group(betas=(0.9, 1.0)),
    "nothing for eps": group(eps=None),
    "text for a decay": group(weight_decay="much"),
    "amsgrad": group(amsgrad=True),
    "maximize": group(maximize=True),
    "Adam's decay": group(decoupled_weight_decay=False),
    "no weight decay": lambda s: s["param_groups"][1].pop("weight_decay"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_state_dictionary_that_does_not_fit_is_refused_and_changes_nothing(name):
    for states, resident in (("fp32", 0), ("8bit", 2)):
        model, optimizer = trained(states=states, resident=resident, steps=1)
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():  # what is loaded before the bad entry would show
            state["exp_avg"] += 1
            state["step"] += 5
        saved["param_groups"][0]["lr"] = saved["param_groups"][1]["lr"] = 0.7
        BAD[name](saved)
        before = everything(model, optimizer)
        with pytest.raises(ValueError) as caught:
            optimizer.load_state_dict(saved)
        assert len(str(caught.value)) > 20, "it says what is wrong"
        assert_all_the_same(before, model, optimizer)
    ordinary_loop(model, optimizer, numbers(1))
    assert {state["step"].item() for state in optimizer.state.values()} == {2}


@pytest.mark.parametrize(("name", "value"), [("exp_avg_sq", torch.inf), ("exp_avg", 3e38), ("exp_avg_sq", 2e36)])
def test_what_eight_bits_do_not_hold_is_refused_there_and_trains_as_pytorch_does_in_fp32(name, value):
    """A square that was too large for fp32: torch.optim.AdamW leaves such a weight where it is, and so do we."""
    plain, model = pair(Residual)
    theirs, ours = (kind(groups(m), **ADAMW) for kind, m in ((torch.optim.AdamW, plain), (stronghold.AdamW, model)))
    ordinary_loop(plain, theirs, numbers(1))
    weights, saved = copy.deepcopy(plain.state_dict()), copy.deepcopy(theirs.state_dict())
    moment(name, value)(saved)
    moment("exp_avg_sq", torch.inf)(saved)
    for one, optimizer in ((plain, theirs), (model, ours)):
        one.load_state_dict(weights)
        one.zero_grad()
        optimizer.load_state_dict(copy.deepcopy(saved))
        torch.manual_seed(3)
        ordinary_loop(one, optimizer, numbers(2))
    assert_same_models(model, plain)
    assert_same_states(ours, theirs)
    model, optimizer = trained(states="8bit")
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=rf"{name} of parameter 2 .*for eight bits hold no more"):
        optimizer.load_state_dict({**saved, "state": {2: saved["state"][2]}})
    assert_all_the_same(before, model, optimizer)


@STATES
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_another_optimizers_states_are_refused_and_change_nothing(kind, states):
    model, optimizer = trained(states=states)
    plain, _ = pair(Residual)
    other = kind(groups(plain), lr=0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    ordinary_loop(plain, other, numbers(1))
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=r"another optimizer than AdamW|Adam's"):
        optimizer.load_state_dict(other.state_dict())
    assert_all_the_same(before, model, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@RESIDENT
def test_moments_of_another_floating_type_are_taken_as_what_they_say(resident, dtype):
    _, optimizer = trained(resident=resident)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].to(dtype)
    optimizer.load_state_dict(saved)
    for number, state in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype is torch.float32
            assert torch.equal(state[name], saved["state"][number][name].float())


@RESIDENT
@pytest.mark.parametrize(("first", "second"), [("8bit", "8bit"), ("8bit", "fp32"), ("fp32", "8bit")])
def test_eight_bit_states_are_the_same_format(first, second, resident):
    """What is in eight bits goes to eight bits and to fp32 exactly; what is in fp32 is rounded to the nearest code."""
    source, target = trained(states=first, resident=resident), trained(states=second, resident=2 - resident, steps=1)
    saved = source[1].state_dict()
    assert all(state["exp_avg"].dtype is torch.float32 for state in saved["state"].values())
    target[1].load_state_dict(copy.deepcopy(saved))
    loaded = target[1].state_dict()
    if first == "8bit":
        assert_close(loaded, saved, rtol=0.0, atol=0.0)
        again = trained(states="8bit", resident=resident, steps=1)
        again[1].load_state_dict(copy.deepcopy(loaded))
        assert_close(again[1].state_dict(), saved, rtol=0.0, atol=0.0)
        return
    for number, state in loaded["state"].items():
        exact = saved["state"][number]["exp_avg_sq"]
        small = exact < exact.max() * 2.0**-14  # beside their block's largest they have the least code
        off = (state["exp_avg_sq"] - exact).abs() / exact.clamp(min=1e-38)
        assert (off <= 2.0**-5 + 1e-6)[~small].all()
        assert state["step"] == saved["state"][number]["step"]


def test_a_dictionary_with_a_graph_or_strides_is_copied_from():
    model, optimizer = trained()
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = (state["exp_avg"] * 2).requires_grad_()
        wide = torch.zeros(*state["exp_avg_sq"].shape, 2)
        wide[..., 0] = state["exp_avg_sq"]
        state["exp_avg_sq"] = wide[..., 0]
    optimizer.load_state_dict(saved)
    ordinary_loop(model, optimizer, numbers(1))
    for number, state in optimizer.state_dict()["state"].items():
        assert not state["exp_avg"].requires_grad
        assert state["exp_avg"].is_contiguous()
        assert state["step"] == saved["state"][number]["step"] + 1


# ---- parameters that lie oddly ----


class Odd(Block):
    """Parameters that are transposed, cut out of a larger tensor, or reversed in their dimensions."""

    def __init__(self):
        super().__init__()
        self.up.weight = nn.Parameter(torch.randn(SIZE, 2 * SIZE).mul(0.1).t())
        self.down.weight = nn.Parameter(torch.randn(SIZE, 4 * SIZE).mul(0.1)[:, ::2])
        self.norm.weight = nn.Parameter(torch.ones(SIZE, 3)[:, 1])


class OddRoot(Residual):
    def __init__(self):
        super().__init__(block=Odd)
        self.into.weight = nn.Parameter(torch.randn(SIZE, SIZE).mul(0.2).t())
        self.out.weight = nn.Parameter(torch.randn(6, SIZE).mul(0.2)[::2])


@STATES
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("resident", [0, 1, 4])
def test_parameters_that_are_not_contiguous_train_exactly(resident, update, states):
    plain, model = pair(OddRoot, resident=resident)
    assert not any(p.is_contiguous() for p in (plain.into.weight, plain.layers[1].up.weight))
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=0.0)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, update=update, states=states)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for one, each in ((model, optimizer), (plain, expected)):
        torch.manual_seed(5)
        ordinary_loop(one, each, numbers(3))
    tolerance = {} if states == "fp32" else {"rtol": 0.0, "atol": 0.02}
    assert_same_models(model, plain, **tolerance)
    if states == "fp32":
        assert_same_states(optimizer, expected)
    model.load_state_dict(plain.state_dict())
    assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=0.0)


def whole(model):
    """The down projection of one layer is the transposed up projection's own memory."""
    layer = model.layers[1]
    layer.down.weight = nn.Parameter(layer.up.weight.data.view(SIZE, 2 * SIZE))


def across_layers(model):
    model.layers[2].up.weight = nn.Parameter(model.layers[1].up.weight.data)


def of_root(model):
    model.into.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.2)
    model.out.weight = nn.Parameter(model.into.weight.data[:3])


def of_a_root_parameter_and_a_layer(model):
    model.into.weight = nn.Parameter(model.layers[0].up.weight.data[:SIZE])


def in_part(model):
    memory = torch.randn(3 * SIZE)
    model.layers[0].norm.weight = nn.Parameter(memory[: 2 * SIZE : 2])
    model.layers[0].norm.bias = nn.Parameter(memory[SIZE : 2 * SIZE])


def within_itself(model):
    """One number that is a whole parameter: plain PyTorch's in-place update refuses it."""
    model.layers[0].norm.weight = nn.Parameter(torch.ones(1).expand(SIZE))


def as_a_buffer(model):
    """Not trained by itself, and follows the parameter whose memory it is."""
    model.layers[3].register_buffer("copied", model.layers[3].up.weight.data)
    model.layers[3].register_forward_hook(lambda module, args, output: output + module.copied.sum())


ALIASES = [whole, across_layers, of_root, of_a_root_parameter_and_a_layer, in_part, within_itself, as_a_buffer]


@RESIDENT
@pytest.mark.parametrize("alias", ALIASES, ids=lambda alias: alias.__name__)
def test_parameters_that_share_memory_are_refused_or_stay_shared(alias, resident):
    """In plain PyTorch an update of one is an update of the other; two copies would drift apart in silence."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Residual())
        alias(models[-1])
    plain, model = models
    before = kept(model)
    objects = [(id(p), type(p), p.data_ptr()) for p in model.parameters()]
    try:
        stronghold.offload(model, device="cpu", window=2, resident=resident)
    except (ValueError, OffloadedModelError) as error:
        assert re.search(r"memory|storage|overlap|shar", str(error)), error
        assert re.search(r"layers\.|into|out", str(error)), "it names the parameters"
        assert_unchanged(before, model)
        assert [(id(p), type(p), p.data_ptr()) for p in model.parameters()] == objects
        return
    for one, kind in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        torch.manual_seed(5)
        ordinary_loop(one, kind(one.parameters(), **ADAMW), numbers(3))
    assert_same_models(model, plain)


def interleaved(model):
    for layer in model.layers:
        memory = torch.randn(2 * SIZE, 2 * SIZE) * 0.1
        layer.up.weight = nn.Parameter(memory[:, ::2])
        layer.down.weight = nn.Parameter(memory[:, 1::2].t())


def behind_one_another(model):
    for layer in model.layers:
        parameters = list(layer.parameters())
        flat = nn.utils.parameters_to_vector(parameters).detach()
        nn.utils.vector_to_parameters(flat, parameters)
        assert len({p.untyped_storage().data_ptr() for p in parameters}) == 1


@RESIDENT
@pytest.mark.parametrize("lay", [interleaved, behind_one_another], ids=lambda lay: lay.__name__)
def test_parameters_beside_one_another_in_one_piece_of_memory_are_no_aliases(lay, resident):
    """Flattened, as recurrent layers and some trainers have them: no element belongs to two."""

    def build():
        model = Residual()
        lay(model)
        return model

    plain, model = pair(build, resident=resident)
    for one, kind in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        torch.manual_seed(5)
        ordinary_loop(one, kind(one.parameters(), **ADAMW), numbers(3))
    assert_same_models(model, plain)


@RESIDENT
@pytest.mark.parametrize("layer", range(4))
def test_types_that_differ_within_a_layer_are_refused_by_the_layers_name(layer, resident):
    model = Residual()
    model.layers[layer].down.half()
    before = kept(model)
    with pytest.raises(ValueError, match=rf"torch.float16, torch.float32.* in layers.{layer}\).*pass dtype="):
        stronghold.offload(model, device="cpu", resident=resident)
    assert_unchanged(before, model)
    assert not any(isinstance(p, OffloadedParameter) for p in model.parameters())


# ---- the processor ----


@pytest.mark.parametrize("isa", ["avx10", "AVX2", "neon", "", "auto "])
def test_an_instruction_set_that_there_is_not_is_refused_before_anything_is_written(isa):
    w, g, m, v = (torch.full((9,), float(i)) for i in range(4))
    segment = Segment(
        weight=w, grad=g, exp_avg=m, exp_avg_sq=v, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, step=1
    )
    for call in (
        lambda: native.adamw([segment], threads=1, isa=isa),
        lambda: native.squared_norms([w], threads=1, isa=isa),
        lambda: native.accumulate([Addition(target=w, source=g)], threads=1, isa=isa),
        lambda: native.stream(w, g, m, v, threads=1, isa=isa),
    ):
        with pytest.raises(ValueError, match=r"isa must be one that this processor runs .* it runs plain.*'auto'"):
            call()
    assert [t[0].item() for t in (w, g, m, v)] == [0.0, 1.0, 2.0, 3.0]


# ---- memory that the system refuses ----


class Refusing:
    """Gives out so many pieces of memory, and then none, or none of a length, until it is told to."""

    def __init__(self, monkeypatch):
        self.left, self.at_most, self.error = None, None, OSError(errno.ENOMEM, "Cannot allocate memory")
        self._mmap = mmap.mmap
        monkeypatch.setattr(mmap, "mmap", self)

    def __call__(self, fileno, length, *rest, **settings):
        if self.left == 0 or (self.at_most is not None and length > self.at_most):
            raise type(self.error)(*self.error.args)  # a new one: an exception keeps what its frames hold
        if self.left is not None:
            self.left -= 1
        return self._mmap(fileno, length, *rest, **settings)


@pytest.fixture
def memory(monkeypatch):
    return Refusing(monkeypatch)


@pytest.mark.parametrize(
    ("states", "update", "error"),
    [
        ("fp32", "deferred", OSError(errno.ENOMEM, "Cannot allocate memory")),
        ("fp32", "in_backward", MemoryError()),
        ("8bit", "deferred", MemoryError()),
        ("8bit", "in_backward", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_states_that_the_system_refuses_are_told_with_their_bytes_and_the_remedies(memory, states, update, error):
    """Wherever it begins to refuse, nothing is taken and nothing has changed."""
    _, model = pair(Residual, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before, held = kept(model), stronghold.report(model).host_bytes
    memory.error = error
    refused = 0
    while True:
        memory.left = refused
        try:
            optimizer = stronghold.AdamW(model.parameters(), **ADAMW, states=states, update=update)
        except MemoryError as caught:
            message = str(caught)
        else:
            break
        assert re.search(r"\d+(\.\d+)? ([KMGT]i)?B", message), message
        assert "AdamW" in message or "state" in message, "what the memory is for"
        for remedy in ("states='8bit'", "update='in_backward'", "fr(ee|o)ze"):
            assert re.search(remedy, message), message
        assert_unchanged(before, model)
        if stronghold.report(model).host_bytes != held:
            gc.collect()
        assert stronghold.report(model).host_bytes == held, "what was taken before has been given back"
        assert stronghold.report(model).states is None
        refused += 1
    assert refused >= 4, "it must have been refused a few times for this test to tell"
    memory.left = None
    model.zero_grad()
    ordinary_loop(model, optimizer, [batch.bfloat16() for batch in numbers(2)])
    assert {state["step"].item() for state in optimizer.state.values()} == {2}


def test_after_a_refusal_a_smaller_optimizer_can_be_made(memory):
    model = stronghold.offload(Residual(), device="cpu", window=1)
    memory.at_most = 8 * sum(p.numel() for p in model.layers[0].parameters()) - 1  # two fp32 moments are longer
    with pytest.raises(MemoryError):
        stronghold.AdamW(model.parameters())
    optimizer = stronghold.AdamW(model.parameters(), states="8bit", update="in_backward")
    ordinary_loop(model, optimizer, numbers(2))


@RESIDENT
def test_a_model_that_the_system_has_no_memory_for_is_left_as_it_was(memory, resident):
    """Wherever in ``offload`` it begins to refuse, the model is an ordinary one that trains and can be offloaded."""
    torch.manual_seed(0)
    model = Residual().eval()
    plain = copy.deepcopy(model)
    batch, refused = numbers(1)[0], 0
    while True:
        memory.left = refused
        try:
            stronghold.offload(model, device="cpu", window=1, resident=resident, dtype=torch.bfloat16)
        except MemoryError as caught:
            message = str(caught)
        else:
            break
        finally:
            memory.left = None
        assert re.search(r"\d+(\.\d+)? ([KMGT]i)?B", message), message
        assert engine_of(model) is None
        assert not any(isinstance(p, OffloadedParameter) for p in model.parameters()), refused
        assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=0.0, atol=0.0)
        assert torch.equal(model(batch), plain(batch))
        refused += 1
    assert refused >= 4
    ordinary_loop(model, stronghold.AdamW(model.parameters()), [batch.bfloat16()])


def test_sums_that_the_system_refuses_lose_no_gradient(memory):
    """A second backward pass in bf16 takes more; without it the first one's gradients stay."""
    _, model = pair(Residual, dtype=torch.bfloat16)
    model.eval()
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    first, second = (batch.bfloat16() for batch in numbers(2))
    model(first).sum().backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    memory.left = 0
    with pytest.raises(MemoryError):
        model(second).sum().backward()
    memory.left = None
    for name, parameter in model.named_parameters():
        if name.startswith("layers."):
            assert torch.equal(parameter.grad, before[name]), name
    optimizer.zero_grad()
    ordinary_loop(model, optimizer, [first, second])


def test_a_state_dictionary_whose_moments_the_system_refuses_changes_nothing(memory):
    """Of parameters that were frozen here and are not in the dictionary: their moments are taken when it is loaded."""
    plain, _ = pair(Frozen)
    plain.requires_grad_(True)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    ordinary_loop(plain, theirs, numbers(1))
    _, model = pair(Frozen)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    ordinary_loop(model, optimizer, numbers(1))
    for refused in range(3):
        before = everything(model, optimizer)
        memory.left = refused
        with pytest.raises(MemoryError):
            optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
        memory.left = None
        assert_all_the_same(before, model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert_same_states(optimizer, theirs)


def test_a_host_budget_holds_for_states_that_are_loaded_too():
    plain, _ = pair(Frozen)
    plain.requires_grad_(True)
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    ordinary_loop(plain, theirs, numbers(1))
    _, first = pair(Frozen)
    optimizer = stronghold.AdamW(first.parameters(), **ADAMW)
    budget = stronghold.report(first).host_bytes
    _, model = pair(Frozen, host_memory=budget)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    before = everything(model, optimizer)
    with pytest.raises(BudgetError, match="host_memory"):
        optimizer.load_state_dict(theirs.state_dict())
    assert_all_the_same(before, model, optimizer)
    assert stronghold.report(model).host_bytes <= budget


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@RESIDENT
def test_budgets_hold_for_what_is_unfrozen_after_the_optimizer_was_made(resident, update):
    """It needs moments, which nobody has reckoned with: refused when they would be taken, in the step or before it."""

    def build():
        model = Residual()
        model.layers[0].requires_grad_(False)
        return model

    _, first = pair(build, resident=resident)
    _, kept = pair(build, resident=resident)
    deferred = stronghold.AdamW(kept.parameters(), **ADAMW)
    device_memory = stronghold.report(kept).device_bytes  # offload cannot know that resident layers keep no gradients
    other = stronghold.AdamW(first.parameters(), **ADAMW, update=update)
    budgets = {"host_memory": stronghold.report(first).host_bytes, "device_memory": device_memory}
    _, model = pair(build, resident=resident, **budgets)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, update=update)
    ordinary_loop(model, optimizer, numbers(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.requires_grad_(True)
    with pytest.raises(BudgetError):
        ordinary_loop(model, optimizer, numbers(1))
    optimizer.wait()
    if not resident:
        report = stronghold.report(model)
        assert report.host_bytes <= budgets["host_memory"]
        assert report.device_bytes <= budgets["device_memory"]
    model.layers[0].requires_grad_(False)
    optimizer.zero_grad()
    if update == "in_backward":  # the layers behind that one are updated
        with pytest.raises(OffloadedModelError, match="updated in part"):
            model(numbers(1)[0])
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
    ordinary_loop(model, optimizer, numbers(1))
    assert other.states == deferred.states == "fp32"


SCRIPT = """
import re, resource, sys, torch, stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig

torch.set_num_threads(1)
torch.manual_seed(0)
model = GPT(GPTConfig(layers=4, hidden=768, heads=8, vocabulary=64, sequence=16))
stronghold.offload(model, window=1, device="cpu")
tokens = torch.randint(0, 64, (1, 16))
model(tokens, labels=tokens).loss.backward()  # what a pass needs has been taken
model.zero_grad()
parameters = sum(p.numel() for p in model.parameters())
before = [p.detach().clone().sum().item() for p in model.parameters()]
held = stronghold.report(model).host_bytes
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
limit = now + 6 * parameters  # 8 bytes per parameter in fp32, 2 in eight bits
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    stronghold.AdamW(model.parameters(), update="in_backward")
except MemoryError as error:
    print(error)
else:
    sys.exit("the limit must refuse the states")
assert stronghold.report(model).host_bytes == held
assert [p.detach().clone().sum().item() for p in model.parameters()] == before
optimizer = stronghold.AdamW(model.parameters(), states="8bit", update="in_backward")
losses = []
for _ in range(3):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
optimizer.wait()
assert losses[2] < losses[0], losses
print("trained on")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS is enforced on Linux")
def test_under_a_real_limit_the_states_are_refused_and_smaller_ones_train():
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # else every thread reserves 64 MiB of addresses
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert "trained on" in done.stdout
    assert "states='8bit'" in done.stdout
    assert re.search(r"\d+(\.\d+)? [MG]iB", done.stdout)


def test_torchs_arguments_are_taken_where_they_ask_for_nothing():
    _, model = pair(Residual)
    nothing = {"amsgrad": False, "maximize": False, "foreach": None, "fused": None, "capturable": False}
    expected = stronghold.AdamW(model.parameters())
    for settings in (nothing, {"fused": False, "foreach": False, "differentiable": False}):
        assert stronghold.AdamW(model.parameters(), **settings).state_dict() == expected.state_dict()
    refused = {
        "amsgrad": "step the same parameters with torch.optim.AdamW",
        "maximize": "negate the loss",
        "differentiable": "leave it out",
        "foreach": "one fused kernel, whatever is passed: leave it out",
        "fused": "one fused kernel, whatever is passed: leave it out",
        "capturable": "one fused kernel, whatever is passed: leave it out",
    }
    for name, remedy in refused.items():
        rule = rf"{name} must be (False|None) in stronghold.AdamW \(got True\); .*{remedy}"
        with pytest.raises(ValueError, match=rule):
            stronghold.AdamW(model.parameters(), **{name: True})
    for name in ("momentum", "decoupled_weight_decay"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            stronghold.AdamW(model.parameters(), **{name: True})


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("window", [1, 2])
def test_training_goes_on_behind_a_backward_pass_whose_update_was_refused(window, activations):
    """The layer that was open is over by that: it is in no slot any more when its parameters are looked for there."""
    models = [pair(lambda: Residual(5), window=window, activations=activations)[1] for _ in range(2)]
    ours = [stronghold.AdamW(model.parameters(), update="in_backward", **ADAMW) for model in models]
    for model, optimizer in zip(models, ours, strict=True):
        torch.manual_seed(2)
        ordinary_loop(model, optimizer, numbers(1))
    loss = models[0](numbers(1)[0])
    ours[0].param_groups[0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize"):
        loss.backward()
    ours[0].param_groups[0]["maximize"] = False
    ours[0].zero_grad()
    for model, optimizer in zip(models, ours, strict=True):
        torch.manual_seed(3)
        ordinary_loop(model, optimizer, numbers(2))
    assert_same_models(*models)
    assert_same_states(*ours)

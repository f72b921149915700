"""Parameters of other kinds are refused as what they are, by name and with the remedy, before anything has changed."""

from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing  # has ForkingPickler move what it is given
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import OffloadedModelError
from stronghold.unit import OffloadedParameter, unit_of
from tests.small import SIZE, Block, Residual, assert_close, numbers, pair


class Tagged(nn.Parameter):
    """A parameter that its owner tells by its class."""


def quantized(weight):
    return nn.Parameter(torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8), requires_grad=False)


def nested(layout):
    return lambda weight: nn.Parameter(torch.nested.nested_tensor([weight, weight[:3]], layout=layout))


def masked(weight):
    return nn.Parameter(torch.masked.masked_tensor(weight, weight > 0))


def fake(weight):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return nn.Parameter(torch.empty(weight.shape))


def inference(weight):
    with torch.inference_mode():
        return nn.Parameter(weight.clone())


def frozen(dtype):
    return lambda weight: nn.Parameter(weight.to(dtype), requires_grad=False)


KINDS = [
    ("of torch.qint8); quantised weights", quantized),
    ("of torch.int8); register it as a buffer", frozen(torch.int8)),
    ("of torch.bool); register it as a buffer", frozen(torch.bool)),
    ("of torch.complex64); keep its torch.view_as_real()", frozen(torch.complex64)),
    ("of layout torch.sparse_coo); make it dense", lambda weight: nn.Parameter(weight.to_sparse())),
    ("of layout torch.sparse_csr); make it dense", lambda weight: nn.Parameter(weight.to_sparse_csr())),
    ("of layout torch._mkldnn); make it dense", lambda weight: nn.Parameter(weight.to_mkldnn(), requires_grad=False)),
    ("a nested tensor); pad it", nested(torch.strided)),
    ("a nested tensor); pad it", nested(torch.jagged)),
    ("a torch.masked.maskedtensor.core.MaskedTensor); its class would be lost", masked),
    (
        "a torch.testing._internal.two_tensor.TwoTensor); its class would",
        lambda w: nn.Parameter(TwoTensor(w, w.clone())),
    ),
    ("Tagged); its class would be lost: make it an nn.Parameter", Tagged),
    ("FakeTensor); build the model outside of FakeTensorMode", fake),
    ("made under torch.inference_mode()); build or load", inference),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("where", ["layers.1.up", "into"])
@pytest.mark.parametrize(("message", "kind"), KINDS)
def test_each_other_kind_is_refused_as_what_it_is(message, kind, where):
    model = Residual()
    owner = model.get_submodule(where)
    owner._parameters["weight"] = kind(owner.weight.detach())
    with pytest.raises(ValueError, match=r"a parameter must be a plain nn.Parameter") as refusal:
        stronghold.offload(model, device="cpu", dtype=torch.float32)
    assert f"(got {where}.weight, " in str(refusal.value)
    assert message in str(refusal.value)
    assert not any(isinstance(parameter, OffloadedParameter) for parameter in model.parameters())


def test_lazy_parameters_and_buffers_have_no_shape_yet():
    model = Residual()
    model.layers[2].up = nn.LazyLinear(32)
    with pytest.raises(ValueError, match=r"must be initialised \(got layers.2.up.weight"):
        stronghold.offload(model, device="cpu")
    model.layers[2].up = nn.LazyBatchNorm1d(affine=False)
    with pytest.raises(ValueError, match=r"must be initialised \(got layers.2.up.running_mean"):
        stronghold.offload(model, device="cpu")
    model.layers[2].up = nn.LazyLinear(32)
    model(torch.zeros(1, 1, 16))
    assert stronghold.offload(model, device="cpu") is model


class Beside(nn.Module):
    """Parameters that are views of one memory, and share its version."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(SIZE * SIZE + SIZE).mul(0.2)
        self.weight = nn.Parameter(memory[: SIZE * SIZE].view(SIZE, SIZE))
        self.bias = nn.Parameter(memory[SIZE * SIZE :])

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


def test_a_write_into_one_of_several_views_leaves_the_low_bits_of_the_others():
    _, model = pair(lambda: Residual(2, Beside), dtype=torch.bfloat16, window=1)
    layer = model.layers[0]
    unit = unit_of(layer.weight)
    before = unit.owner.settled_value(unit, 0, exact=True).clone()
    assert not torch.equal(before.bfloat16().float(), before), "there are no low bits to lose"
    with torch.no_grad():
        layer.bias.mul_(0.5)
    assert layer.weight._version == layer.bias._version == 1
    assert torch.equal(unit.owner.settled_value(unit, 0, exact=True), before)
    bias = layer.bias.detach().float()
    assert torch.equal(unit.owner.settled_value(unit, 1, exact=True), bias)


@pytest.mark.parametrize("store", ["ram", "disk"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_write_through_what_was_held_across_a_step_becomes_the_master(tmp_path, store, update):
    """Also where the layer was in a slot when it was updated: what is held then is a second user, not a third."""
    where = {"ram": "ram", "disk": tmp_path / "store"}[store]
    _, model = pair(lambda: Residual(2), dtype=torch.bfloat16, window=1, store=where)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, update=update)
    weight = model.layers[0].up.weight
    unit, index = unit_of(weight), weight.__dict__["_index"]
    held = weight.data
    model(numbers(1)[0].bfloat16()).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = unit.owner.settled_value(unit, index, exact=True).clone().flatten()
    held.view(-1)[70] = 0.3
    after = unit.owner.settled_value(unit, index, exact=True).flatten()
    assert after[70] == torch.tensor(0.3).bfloat16().float()
    block = slice(64, 128)  # those beside it lose their low bits
    assert torch.equal(after[block], held.view(-1)[block].float())
    others = torch.ones(len(after), dtype=torch.bool)
    others[block] = False
    assert torch.equal(after[others], before[others])
    assert not torch.equal(before[others].bfloat16().float(), before[others]), "there are no low bits to lose"


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("hold", [lambda p: p.data, lambda p: p.detach().numpy()], ids=["data", "numpy"])
def test_what_is_written_through_memory_that_is_let_go_of_then_is_computed_with(hold, window, training):
    """One element, which no sample of the weight need show; what is held is gone before the model computes again."""
    plain, model = pair(lambda: Residual(2, lambda: Block(dropout=0.0)), window=window)
    batch = numbers(1)[0]
    for element in range(4):
        held = hold(model.layers[0].up.weight)
        with torch.set_grad_enabled(training):
            model(batch)
        held.reshape(-1)[element] = element + 1
        del held
        plain.layers[0].up.weight.data.view(-1)[element] = element + 1
        assert torch.equal(model(batch), plain(batch)), element


@pytest.mark.parametrize("window", ["auto", 1, 2])
def test_a_weight_that_another_is_set_into_is_that_one(window):
    """``remove_parametrizations`` sets the weight that it was computed from; an optimizer goes on from there."""

    def build():
        model = Residual(3, lambda: Block(dropout=0.0))
        for layer in model.layers:
            nn.utils.parametrizations.spectral_norm(layer.up)
        return model.eval()

    def loop(model):
        seen = []
        for step, batch in enumerate(numbers(4)):
            if step == 1:
                for layer in model.layers:
                    nn.utils.parametrize.remove_parametrizations(layer.up, "weight")
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            if step == 2:
                weight = model.layers[1].up.weight
                with torch.no_grad():
                    assert weight.set_(torch.ones_like(weight).untyped_storage(), 0, weight.shape) is weight
            loss = model(batch)
            seen.append(loss.detach())
            if step:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return seen

    expected, got = map(loop, pair(build, window=window))
    assert_close(got, expected)


def test_what_has_another_shape_is_not_set():
    _, model = pair(Residual, window=1)
    weight = model.layers[0].up.weight
    before = weight.detach().clone()
    with pytest.raises(OffloadedModelError, match="keeps its shape and dtype"):
        weight.set_(torch.ones(3))
    assert torch.equal(weight, before)


SENT = {
    "share_memory_": lambda model: model.layers[1].up.weight.share_memory_(),
    "state_dict": lambda model: ForkingPickler.dumps(model.state_dict()),
    "parameter": lambda model: ForkingPickler.dumps(model.layers[1].up.weight),
    "model": lambda model: ForkingPickler.dumps(model),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("send", SENT)
def test_weights_that_are_moved_into_shared_memory_are_refused(send, window):
    """What a queue of torch.multiprocessing does to a tensor's storage: the engine would go on with what was there."""
    _, model = pair(Residual, window=window)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(numbers(1)[0]).backward()
    SENT[send](model)
    optimizer.step()
    with pytest.raises(OffloadedModelError, match=r"layers\.[01] have been moved into memory that processes share"):
        model(numbers(1)[0])


def test_share_memory_of_the_model_is_refused():
    _, model = pair(Residual, window=1)
    with pytest.raises(OffloadedModelError, match="share_memory"):
        model.share_memory()
    assert not any(parameter.is_shared() for parameter in model.parameters())


@pytest.mark.parametrize("kept", [True, False])
def test_gradients_that_are_moved_into_shared_memory_are_those_of_their_pass(kept):
    plain, model = pair(lambda: Residual(3, lambda: Block(dropout=0.0)), window=1)
    held, found = [], []
    for one in (plain, model):
        for step, batch in enumerate(numbers(3)):
            one(batch * (step + 1)).backward()
            found.append([p.grad.clone() for p in one.parameters()])
            sent = [p.grad for p in one.parameters()]
            ForkingPickler.dumps(sent)
            held += [(p.grad.clone(), p.grad) for p in one.parameters()] if kept else []
            one.zero_grad()
            del sent
    assert_close(found[3:], found[:3])
    assert all(torch.equal(then, now) for then, now in held)


HOLDS = {
    "tensor": (lambda g: g, lambda g: g.clone()),
    "storage": (lambda g: g.untyped_storage(), lambda storage: torch.tensor(list(storage))),
    "typed storage": (lambda g: g.storage(), lambda storage: torch.tensor(storage.tolist())),
    "numpy": (lambda g: g.numpy(), torch.tensor),
    "transposed": (lambda g: g.t(), lambda g: g.clone()),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("hold", HOLDS)
def test_a_gradient_that_is_held_keeps_its_values(hold, passes):
    """The memory of a layer's gradients on the host is the next pass's, unless the user has any of it."""
    _, model = pair(lambda: Residual(2, lambda: Block(dropout=0.0)), window=1)
    optimizer = stronghold.AdamW(model.parameters())
    take, read = HOLDS[hold]
    held = []
    for batch in numbers(4):
        for _ in range(passes):
            model(batch).backward()
        held += [(take(p.grad), read(take(p.grad))) for p in (model.layers[0].up.weight, model.layers[1].down.weight)]
        optimizer.step()
        optimizer.zero_grad()
        assert all(torch.equal(read(one), values) for one, values in held)
        del held[2:4]  # and what is let go of is used again


TRANSFORMS = {
    "vmap": lambda model, x: torch.func.vmap(model)(x[None]),
    "grad": lambda model, x: torch.func.grad(lambda z: model(z).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
}


@pytest.mark.parametrize("root", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_of_torch_func_is_refused_as_one(transform, root):
    first = [nn.Linear(SIZE, SIZE)] if root else []
    _, model = pair(
        lambda: nn.Sequential(*first, Residual(2, lambda: Block(dropout=0.0))), layers=f"{len(first)}.layers"
    )
    batch = numbers(1)[0]
    with pytest.raises(OffloadedModelError, match="vmap, grad or jvp"):
        TRANSFORMS[transform](model, batch)
    with torch.no_grad():
        assert model(batch).isfinite()


def test_a_gradient_is_deleted_as_any_parameter_s():
    model = stronghold.offload(Residual(), device="cpu", window=1)
    for parameter in model.parameters():
        model(numbers(1)[0]).backward()
        del parameter.grad
        assert parameter.grad is None
    model(numbers(1)[0]).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_passes_that_no_backward_follows_leave_nothing_behind():
    model = stronghold.offload(Residual(), device="cpu", window=1)
    runs = []
    for _ in range(4):
        model(numbers(1)[0])
        runs.append(len(engine_of(model)._runs))
    assert runs[0] == runs[-1]

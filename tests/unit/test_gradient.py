"""Gradients that know what is under way with them: ordinary tensors to everybody, until somebody writes or borrows."""

import copy
import functools
import gc
import io
import pickle
import threading
import time
import weakref

import numpy as np
import pytest
import torch

import stronghold
from stronghold.split import join
from stronghold.unit import OffloadedGradient, grad_meta_of, note_gradient
from tests.small import ADAMW, Residual, numbers, pair

LAYER, ROOT = "layers.0.up.weight", "out.weight"


def trained(*, backwards=1, dtype=torch.float32, **settings):
    _, model = pair(Residual, dtype=dtype, **settings)
    model.eval()
    model.__dict__["its"] = stronghold.AdamW(model.parameters())  # without one nothing is kept of what is known
    for batch in numbers(backwards):
        model(batch.to(dtype)).sum().backward()
    return model


def gradient_of(model, name=LAYER):
    gradient = model.get_parameter(name).grad
    assert grad_meta_of(gradient) is not None, "or there is nothing to stay"
    return gradient


CASES = {
    "a layer's in fp32": (LAYER, {"dtype": torch.float32}),
    "a layer's in bf16": (LAYER, {"dtype": torch.bfloat16}),
    "a layer's sum": (LAYER, {"dtype": torch.bfloat16, "backwards": 2}),
    "a root parameter's sum": (ROOT, {"dtype": torch.bfloat16, "backwards": 2}),
    "a resident layer's sum": (LAYER, {"dtype": torch.bfloat16, "backwards": 2, "resident": 1}),
}


@functools.cache
def model_of(case):
    name, settings = CASES[case]
    settings = dict(settings)
    backwards = settings.pop("backwards", 1)
    return trained(backwards=0, **settings), name, backwards


def fresh(case):
    """Returns a gradient of a backward pass of its own; the model is the same from test to test."""
    model, name, backwards = model_of(case)
    model.zero_grad()
    for batch in numbers(backwards):
        model(batch.to(model.out.weight.dtype)).sum().backward()
    if grad_meta_of(model.get_parameter(name).grad) is None:  # a test that failed still holds the one before
        model_of.cache_clear()
        return fresh(case)
    return gradient_of(model, name)


def every_kind():
    for case in CASES:
        yield case, fresh(case)


def shown(gradient) -> torch.Tensor:
    """Returns a copy of the values, behind the gradient's back."""
    with torch._C.DisableTorchFunctionSubclass():
        return gradient.detach().clone()


def number_in(gradient) -> torch.Tensor:
    """Returns the fp32 number that a gradient holds by what is known of it."""
    known = grad_meta_of(gradient)
    return shown(gradient).float() if known.remainder is None else join(shown(gradient), known.remainder)


def saved(gradient):
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# ---- who only looks ----

READS = {
    "norm": lambda g: g.norm(),
    "vector norm": lambda g: torch.linalg.vector_norm(g),
    "sum": lambda g: g.sum(),
    "float of a sum": lambda g: float(g.sum()),
    "max": lambda g: torch.max(g, dim=0),
    "repr": repr,
    "str": str,
    "format": lambda g: f"{g}",
    "list": lambda g: g.tolist(),
    "clone": lambda g: g.clone(),
    "deepcopy": copy.deepcopy,
    "arithmetic": lambda g: g + 1,
    "the other way round": lambda g: 2 - g,
    "matrix product": lambda g: torch.zeros(1, len(g), dtype=g.dtype) @ g,
    "comparison": lambda g: (g == g).all(),
    "is it finite": lambda g: torch.isfinite(g).all(),
    "stack": lambda g: torch.stack([g, g]),
    "cat": lambda g: torch.cat((g, g)),
    "where": lambda g: torch.where(g > 0, g, 0.0),
    "foreach norm": lambda g: torch._foreach_norm([g]),
    "foreach product": lambda g: torch._foreach_mul([g], 2.0),
    "operand of an in-place sum": lambda g: torch.zeros(g.shape).add_(g),
    "operand of +=": lambda g: torch.zeros(g.shape).__iadd__(g),
    "source of a copy": lambda g: torch.zeros(g.shape).copy_(g),
    "source of an assignment": lambda g: torch.zeros(1, *g.shape).__setitem__(0, g),
    "keyword operand": lambda g: torch.add(input=torch.zeros(g.shape), other=g),
    "double": lambda g: g.double(),
    "equal": lambda g: torch.equal(g, g.clone()),
    "truth of a number": lambda g: bool(g.sum() == g.sum()),
    "contiguous": lambda g: g.contiguous(),
    "to where it is": lambda g: g.to("cpu"),
    "real": lambda g: g.real,
    "len": len,
}


@pytest.mark.parametrize("read", READS)
def test_whoever_looks_changes_neither_the_gradient_nor_what_is_known(read):
    for case, gradient in every_kind():
        known, values, number = grad_meta_of(gradient), shown(gradient), number_in(gradient)
        squares = known.squares.clone()
        READS[read](gradient)
        assert type(gradient) is OffloadedGradient, case
        assert grad_meta_of(gradient) is known, case
        assert torch.equal(shown(gradient), values), case
        assert torch.equal(number_in(gradient), number), case
        assert torch.equal(known.squares, squares), case


FACTS = {
    "shape": lambda g: g.shape,
    "size": lambda g: g.size(0),
    "dtype": lambda g: g.dtype,
    "device": lambda g: g.device,
    "layout": lambda g: g.layout,
    "stride": lambda g: g.stride(),
    "numel": lambda g: g.numel(),
    "dim": lambda g: g.dim(),
    "requires_grad": lambda g: g.requires_grad,
    "grad_fn": lambda g: g.grad_fn,
    "is_leaf": lambda g: g.is_leaf,
    "is_contiguous": lambda g: g.is_contiguous(),
    "is_cuda": lambda g: g.is_cuda,
    "is_sparse": lambda g: g.is_sparse,
    "_version": lambda g: g._version,
    "isinstance": lambda g: isinstance(g, torch.Tensor),
    "is_tensor": lambda g: torch.is_tensor(g),
    "hash": hash,
    "element_size": lambda g: g.element_size(),
    "len": len,
}


@pytest.fixture
def late():
    """A model whose updates wait for a gate: one that is under way still reads its gradients."""
    model, gate = trained(), threading.Event()
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model.out.weight._unit.owner.device.updates.run(gate.wait)
    optimizer.step()
    yield model, gate
    gate.set()
    optimizer.wait()


def test_facts_are_told_without_waiting(late):
    model, _ = late
    gradient = gradient_of(model)
    for fact in FACTS.values():
        fact(gradient)
    assert gradient.pending
    assert not model.get_parameter(LAYER)._unit.updated.done


LOOKS = ("norm", "clone", "repr", "foreach product", "operand of an in-place sum", "deepcopy")


@pytest.mark.parametrize("use", [READS[name] for name in LOOKS], ids=LOOKS)
def test_whoever_looks_waits_for_the_update_that_reads_the_gradient(late, use):
    model, gate = late
    gradient, done = gradient_of(model), model.get_parameter(LAYER)._unit.updated
    threading.Timer(0.05, gate.set).start()
    use(gradient)
    assert done.done
    assert type(gradient) is OffloadedGradient, "what is known of it still holds"
    assert not gradient.pending


@pytest.mark.parametrize("use", [lambda g: g.zero_(), lambda g: g.view(-1), lambda g: g.data, pickle.dumps])
def test_whoever_writes_or_borrows_waits_too(late, use):
    model, gate = late
    gradient, done = gradient_of(model), model.get_parameter(LAYER)._unit.updated
    threading.Timer(0.05, gate.set).start()
    use(gradient)
    assert done.done
    assert type(gradient) is torch.Tensor


# ---- who writes ----

WRITES = {
    "zero_": lambda g: g.zero_(),
    "fill_": lambda g: g.fill_(3.0),
    "mul_": lambda g: g.mul_(2.0),
    "add_": lambda g: g.add_(1.0),
    "clamp_": lambda g: g.clamp_(-0.1, 0.1),
    "copy_": lambda g: g.copy_(torch.ones(g.shape)),
    "nan_to_num_": lambda g: g.nan_to_num_(),
    "+=": lambda g: g.__iadd__(1.0),
    "*=": lambda g: g.__imul__(2.0),
    "an element": lambda g: g.__setitem__((0, 0), 1.0),
    "masked_fill_": lambda g: g.masked_fill_(g.clone() > 0, 0.0),
    "out": lambda g: torch.mul(g.clone(), 2.0, out=g),
    "function": lambda g: torch.relu_(g),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "foreach zero": lambda g: torch._foreach_zero_([g]),
    "clip_grad_value_": lambda g: _clipped(g, torch.nn.utils.clip_grad_value_, 0.001),
    "clip_grad_norm_": lambda g: _clipped(g, torch.nn.utils.clip_grad_norm_, 0.001),
    "clip_grad_norm_ one by one": lambda g: _clipped(g, torch.nn.utils.clip_grad_norm_, 0.001, foreach=False),
}


def _clipped(gradient, clip, *rest, **settings):
    parameter = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    clip([parameter], *rest, **settings)


@pytest.mark.parametrize("write", WRITES)
def test_written_it_is_a_plain_tensor_of_which_nothing_is_known(write):
    for case, gradient in every_kind():
        plain = shown(gradient)
        WRITES[write](gradient)
        assert type(gradient) is torch.Tensor, case
        assert grad_meta_of(gradient) is None, case
        assert not vars(gradient), "it holds nothing of the model"
        WRITES[write](plain)
        assert torch.equal(gradient, plain), case


# ---- who borrows ----

BORROWS = {
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "view": lambda g: g.view(-1),
    "reshape": lambda g: g.reshape(-1),
    "index": lambda g: g[0],
    "slice": lambda g: g[:],
    "transpose": lambda g: g.t(),
    "mT": lambda g: g.mT,
    "unbind": lambda g: list(g),
    "iter": lambda g: next(iter(g)),
    "flatten": lambda g: g.flatten(),
    "expand": lambda g: g.expand(2, *g.shape),
    "as_strided": lambda g: g.as_strided((1,), (1,)),
    "split": lambda g: g.split(1),
    "chunk": lambda g: torch.chunk(g, 2),
    "untyped_storage": lambda g: g.untyped_storage(),
    "data_ptr": lambda g: g.data_ptr(),
    "pickle": pickle.dumps,
    "save": saved,
    "copy": copy.copy,
    "view_as": lambda g: g.view_as(g.clone()),
    "dtype view": lambda g: g.view(torch.int16),
    "dlpack": torch.from_dlpack,
    "alias": lambda g: torch.ops.aten.alias(g),
    "narrow": lambda g: g.narrow(0, 0, 1),
    "diagonal": lambda g: g.diagonal(),
    "squeeze": lambda g: g.unsqueeze(0).squeeze(0),
}


@pytest.mark.parametrize("borrow", BORROWS)
def test_lent_it_is_a_plain_tensor_of_which_nothing_is_known(borrow):
    """A write through what was lent would leave no trace."""
    for case, gradient in every_kind():
        values = shown(gradient)
        kept = BORROWS[borrow](gradient)
        assert type(gradient) is torch.Tensor, case
        assert grad_meta_of(gradient) is None, case
        assert not vars(gradient), case
        assert torch.equal(gradient, values), case
        del kept


@pytest.mark.parametrize("array", [lambda g: g.numpy(), np.asarray, lambda g: np.from_dlpack(g)], ids=["1", "2", "3"])
def test_an_array_over_its_memory_is_a_loan(array):
    gradient = gradient_of(trained())
    values = shown(gradient)
    lent = array(gradient)
    assert type(gradient) is torch.Tensor
    np.testing.assert_array_equal(lent, values.numpy())


def test_what_is_written_through_a_loan_is_used():
    """With clipping, whose norm would otherwise be that of the gradient before."""
    for borrow in (lambda g: g.data, lambda g: g.view(-1), lambda g: g.detach(), lambda g: g[:], lambda g: g.numpy()):
        model = trained()
        optimizer = stronghold.AdamW(model.parameters(), lr=0.0, max_grad_norm=1.0)
        for parameter in model.parameters():
            if parameter is not model.get_parameter(LAYER):
                parameter.grad = None
        lent = borrow(gradient_of(model))
        lent[...] = 100.0
        optimizer.step()
        parameter = model.get_parameter(LAYER)
        expected = torch.full(parameter.shape, 0.1 / parameter.numel() ** 0.5)
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], expected, rtol=1e-5, atol=0.0)


# ---- copies ----

COPIES = {
    "clone": torch.clone,
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": saved,
    "arithmetic": lambda g: g * 1,
    "to": lambda g: g.to(torch.float64).to(g.dtype),
    "detach and clone": lambda g: g.detach().clone(),
    "within a list": lambda g: copy.deepcopy([g])[0],
    "numpy": lambda g: torch.from_numpy(g.view(torch.uint8).numpy().copy()).view(g.dtype),
}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_is_a_plain_tensor_with_memory_of_its_own(copied):
    for case, gradient in every_kind():
        values = shown(gradient)
        other = COPIES[copied](gradient)
        assert type(other) is torch.Tensor, case
        assert not vars(other), case
        assert torch.equal(other, values), case
        other.zero_()
        assert torch.equal(shown(gradient), values), case
        assert values.any(), case


def test_one_that_is_copied_twice_in_one_structure_is_one():
    gradient = gradient_of(trained())
    one, other = copy.deepcopy([gradient, gradient])
    assert one is other


def test_it_prints_like_any_other():
    gradient = gradient_of(trained())
    assert repr(gradient) == repr(shown(gradient))
    assert str(gradient) == str(shown(gradient))


def test_results_are_plain_tensors():
    for case, gradient in every_kind():
        for name in ("norm", "sum", "clone", "arithmetic", "matrix product", "stack", "double", "where"):
            assert type(READS[name](gradient)) is torch.Tensor, (case, name)
        for result in torch._foreach_mul([gradient], 2.0):
            assert type(result) is torch.Tensor
        assert type(torch.zeros(gradient.shape).add_(gradient)) is torch.Tensor
        assert type(gradient) is OffloadedGradient


def test_in_place_methods_return_the_gradient_itself():
    for _, gradient in every_kind():
        assert gradient.mul_(2.0) is gradient


def test_autograd_takes_it_for_a_constant():
    gradient = gradient_of(trained())
    x = torch.ones(gradient.shape, requires_grad=True)
    (x * gradient).sum().backward()
    assert torch.equal(x.grad, shown(gradient))
    assert type(x.grad) is torch.Tensor


# ---- what is known ----


def test_without_an_optimizer_of_ours_a_gradient_is_a_plain_tensor():
    _, model = pair(Residual)
    model(numbers(1)[0]).backward()
    assert all(type(parameter.grad) is torch.Tensor for parameter in model.parameters())


def test_what_is_known_is_the_sum_of_squares():
    for case, gradient in every_kind():
        expected = number_in(gradient).double().square().sum()
        assert grad_meta_of(gradient).squares.dtype is torch.float64
        torch.testing.assert_close(grad_meta_of(gradient).squares, expected, rtol=1e-12, atol=0.0, msg=case)


def test_a_tensor_of_another_kind_is_left_as_it_is():
    model = trained()
    unit = model.get_parameter(LAYER)._unit

    class Own(torch.Tensor):
        pass

    for tensor in (torch.zeros(3).as_subclass(Own), torch.nn.Parameter(torch.zeros(3))):
        kind = type(tensor)
        note_gradient(tensor, unit, pending=True)
        assert type(tensor) is kind
        assert grad_meta_of(tensor) is None
    assert grad_meta_of(None) is None
    assert grad_meta_of(torch.zeros(3)) is None


def test_a_gradient_of_which_nothing_is_known_is_plain_at_the_first_look():
    model = trained(resident=1)
    gradient = model.get_parameter(LAYER).grad
    assert grad_meta_of(gradient) is None
    assert gradient.shape == (32, 16)
    gradient.norm()
    assert type(gradient) is torch.Tensor
    assert not vars(gradient)


def test_a_gradient_may_be_moved_to_another_parameter():
    """What is known goes with it: the norm is right, and so is the moment."""
    model = trained()
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, max_grad_norm=0.01)
    one, other = model.layers[0].up.weight, model.layers[3].up.weight
    first, second = shown(one.grad), shown(other.grad)
    one.grad, other.grad = other.grad, one.grad
    norm = torch.stack([shown(p.grad).double().norm() for p in model.parameters()]).norm()
    optimizer.step()
    scale = (0.01 / (norm + 1e-6)).float()
    for parameter, gradient in ((one, second), (other, first)):
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, gradient * scale * 0.1, rtol=1e-5, atol=0.0)


# ---- what it keeps alive ----


@pytest.mark.parametrize(
    "kept", ["nothing", "gradients", "gradients that were looked at", "copies", "gradients of a step"]
)
@pytest.mark.parametrize("settings", [{}, {"dtype": torch.bfloat16, "backwards": 2, "resident": 2}], ids=["1", "2"])
def test_no_gradient_keeps_the_model_alive(kept, settings):
    def run():
        model = trained(**settings)
        gradients = [parameter.grad for parameter in model.parameters()]
        if kept == "nothing":
            gradients = []
        elif kept == "gradients that were looked at":
            assert all(gradient.norm() >= 0 for gradient in gradients)
        elif kept == "copies":
            gradients = copy.deepcopy(gradients)
        elif kept == "gradients of a step":
            stronghold.AdamW(model.parameters()).step()
        modules = [weakref.ref(module) for module in (model, model.out)]
        return modules, gradients, [shown(gradient) for gradient in gradients]

    modules, gradients, values = run()
    for _ in range(50):
        gc.collect()
        if not any(reference() is not None for reference in modules):
            break
        time.sleep(0.02)
    assert [reference() for reference in modules] == [None, None]
    # They still are what they were, in memory of their own or of the unit's, which they hold.
    for gradient, value in zip(gradients, values, strict=True):
        assert torch.equal(gradient.clone(), value)
        gradient.zero_()


def test_written_ones_keep_nothing_of_the_model_alive():
    model = trained()
    gradients = [parameter.grad.zero_() for parameter in model.parameters()]
    engine = weakref.ref(model.out.weight._unit.owner)
    del model
    for _ in range(50):
        gc.collect()
        if engine() is None:
            break
        time.sleep(0.02)
    assert engine() is None
    assert not any(gradient.any() for gradient in gradients)

"""Gradients that are used up: their norm is known, as torch's own functions ask for it; all else is refused."""

import copy
import math
import pickle

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils._python_dispatch import TorchDispatchMode

import stronghold
from stronghold.errors import NonFiniteGradientError, OffloadedModelError
from stronghold.unit import Consumed, ConsumedGradient, HostGrad, StandIns, note_squares
from tests.small import ADAMW, Residual, numbers, pair

FOREACH = pytest.mark.parametrize("foreach", [None, True, False])


class Unit:
    """One whose update leaves its squares when it is waited for."""

    def __init__(self):
        self.waited = 0

    def wait_updated(self):
        self.waited += 1


def used(squares=None, dtype=torch.bfloat16):
    unit = Unit()
    consumed = Consumed(unit)
    consumed.squares = None if squares is None else torch.tensor(squares, dtype=torch.float64)
    return unit, StandIns().of(torch.nn.Parameter(torch.ones(4, 3, dtype=dtype)), consumed)


def after_backward(**settings):
    """Returns an offloaded model whose gradients are used up, its optimizer, and the plain model with its own."""
    plain, model = pair(Residual, **settings)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward", **ADAMW)
    for one in (plain, model):
        torch.manual_seed(5)
        one(numbers(1)[0].to(next(one.parameters()).dtype)).backward()
    return plain, model, optimizer


def test_what_stands_for_a_used_gradient_tells_its_shape_and_refuses_all_but_its_norm():
    _, consumed = used(9.0)
    parameter = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    assert type(consumed) is ConsumedGradient
    assert (consumed.shape, consumed.dtype, consumed.device) == ((4, 3), torch.bfloat16, parameter.device)
    parameter.grad = consumed
    assert parameter.grad is consumed
    for use in (
        repr,
        copy.deepcopy,
        pickle.dumps,
        lambda g: g.norm(1),
        lambda g: g.norm(dim=0),
        lambda g: torch.linalg.vector_norm(g, math.inf),
        lambda g: torch._foreach_norm([g], 1),
        lambda g: g + 1,
        lambda g: g.zero_(),
        lambda g: g.data + 1,
        lambda g: g.mul_(0.5),
        lambda g: torch._foreach_mul_([g], 2.0),
        lambda g: torch.zeros(4, 3).add_(g),
        lambda g: g.tolist(),
        lambda g: g.clone(),
    ):
        with pytest.raises(OffloadedModelError, match="use update='deferred'"):
            use(consumed)


@pytest.mark.parametrize(
    "norm",
    [
        lambda g: g.norm(),
        lambda g: g.norm(2),
        lambda g: g.detach().data.norm(2.0),
        torch.norm,
        torch.linalg.vector_norm,
        lambda g: torch.linalg.vector_norm(g, 2, dtype=torch.bfloat16),
        lambda g: torch._foreach_norm([g])[0],
    ],
)
def test_its_norm_waits_for_the_update_that_knows_it(norm):
    unit, consumed = used(9.0)
    assert norm(consumed).item() == 3.0
    assert norm(consumed).dtype is torch.bfloat16
    assert unit.waited == 2


def test_the_norm_of_one_whose_update_never_ran_is_refused():
    with pytest.raises(OffloadedModelError, match=r"read \(but for its norm"):
        used()[1].norm()


def test_a_used_gradient_takes_no_memory():
    consumed = StandIns().of(torch.nn.Parameter(torch.ones(1000, 1000)), Consumed(Unit()))
    with torch._C.DisableTorchFunctionSubclass():
        assert consumed.untyped_storage().nbytes() == 4


@FOREACH
@pytest.mark.parametrize(
    "settings", [{"window": 1}, {"window": 2}, {"window": "auto"}, {"window": 2, "resident": 1}], ids=str
)
def test_the_norm_is_that_of_the_plain_model_and_asking_changes_nothing(foreach, settings):
    plain, model, optimizer = after_backward(**settings)
    wanted = get_total_norm([p.grad for p in plain.parameters()])
    root = model.out.weight.grad.clone()
    asked = get_total_norm([p.grad for p in model.parameters()], foreach=foreach)
    found = clip_grad_norm_(model.parameters(), math.inf, foreach=foreach)
    loose = clip_grad_norm_(model.parameters(), 2 * float(wanted), foreach=foreach)
    torch.testing.assert_close([float(asked), float(found), float(loose)], 3 * [float(wanted)], rtol=1e-6, atol=0)
    assert torch.equal(model.out.weight.grad, root)
    adamw = torch.optim.AdamW(plain.parameters(), **ADAMW)
    adamw.step()
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_norm_is_that_of_its_own_backward_pass():
    _, model, optimizer = after_backward(window=2)
    parameter = model.layers[0].up.weight
    first, norm = parameter.grad, float(parameter.grad.norm())
    optimizer.step()
    optimizer.zero_grad()
    model(3 * numbers(2)[1]).backward()
    assert float(parameter.grad.norm()) != norm
    assert float(first.norm()) == norm


@FOREACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_that_would_scale_is_refused_before_anything_has_changed(foreach, dtype):
    _, model, _ = after_backward(window=2, dtype=dtype)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if "layers" not in name}
    assert len(before) > 1
    # In either order: the root's gradients are there, and could be scaled before one that is used up is come across.
    for parameters in (list(model.parameters()), list(model.parameters())[::-1]):
        with pytest.raises(OffloadedModelError, match=r"cannot be scaled \(got 0\.\d+\).*deferred.*max_grad_norm=0"):
            clip_grad_norm_(parameters, 1e-3, foreach=foreach)
        with pytest.raises(OffloadedModelError, match="but for its norm"):
            clip_grad_norm_(parameters, 1e-3, norm_type=math.inf, foreach=foreach)
    for name, gradient in before.items():
        assert torch.equal(model.get_parameter(name).grad, gradient), name


def test_the_norm_is_a_number_like_any_other():
    _, model, _ = after_backward(window=2)
    norm = clip_grad_norm_(model.parameters(), math.inf)
    number = norm.item()
    assert float(copy.deepcopy(norm)) == float(pickle.loads(pickle.dumps(norm))) == number
    assert type(pickle.loads(pickle.dumps(norm))) is torch.Tensor
    assert f"{norm:.3f}" == f"{number:.3f}"
    assert "tensor" in repr(norm)
    total = torch.zeros(())
    total.add_(norm).mul_(0.5)
    assert type(total) is torch.Tensor
    assert float(total) == pytest.approx(number / 2)
    assert float(torch.stack([norm, norm]).mean()) == pytest.approx(number)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_what_is_not_finite_is_left_to_the_step(nonfinite):
    _, model = pair(Residual, window=2)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward", nonfinite=nonfinite, **ADAMW)
    (model(numbers(1)[0]) * math.nan).backward()
    assert math.isnan(clip_grad_norm_(model.parameters(), 1.0))
    if nonfinite == "skip":
        optimizer.step()
        assert optimizer.skipped_steps == 1
    else:
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()


class Counted(TorchDispatchMode):
    """Counts what PyTorch carries out, views aside: of each a device takes a launch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_norms_of_all_that_an_update_uses_up_are_kept_in_one_copy():
    unit, squares = Unit(), torch.tensor([1.0, 4.0, 9.0, 16.0], dtype=torch.float64)
    used = [Consumed(unit), Consumed(unit), None, Consumed(unit)]
    of_each = zip(squares.unbind(), used, strict=True)
    gradients = [HostGrad(torch.empty(0), one, consumed=consumed) for one, consumed in of_each]
    with Counted() as counted:
        note_squares(gradients)
    squares.zero_()  # the next gradients' memory
    assert [one.norm().item() for one in used if one is not None] == [1.0, 2.0, 4.0]
    assert len(counted.names) == 1
    note_squares(gradients[2:3])  # nothing is used up

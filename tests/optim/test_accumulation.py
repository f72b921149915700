"""Several ``backward()`` calls before a step: their gradients are added in fp32, whatever the compute type."""

import math
import threading

import pytest
import torch
from torch import nn

import stronghold
from stronghold import native
from stronghold.unit import grad_meta_of
from tests.crossed import crossed
from tests.reference import CASES, MasterAdamW, offloaded
from tests.small import Residual, numbers, pair

BACKWARDS = 5


def reference(case, batches, max_norm):
    """Trains in bf16 with every gradient taken apart and added in fp32, and the kernel's arithmetic on fp32 masters."""
    model = case.model()
    optimizer = MasterAdamW(model, dtype=torch.bfloat16, lr=1e-3)
    losses, parameters = [], list(model.parameters())
    for number, batch in enumerate(batches, 1):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.add_up()
        if number % BACKWARDS == 0:
            if max_norm is not None:
                norm = math.sqrt(sum(one.double().square().sum().item() for one in optimizer.sums.values()))
                optimizer.grad_scale = min(1.0, max_norm / (norm + 1e-6))
            optimizer.step()
    return losses, parameters


@pytest.mark.parametrize(("resident", "max_norm"), crossed([0, 2], [None, 0.3], together=1))
def test_bf16_gradients_are_added_in_fp32(resident, max_norm):
    case = CASES["gpt"]
    batches = case.batches(6 * BACKWARDS)
    expected_losses, expected = reference(case, batches, max_norm)
    model, optimizer = offloaded(
        case, window=1, dtype=torch.bfloat16, resident=resident, adamw={"max_grad_norm": max_norm}
    )
    losses = []
    for number, batch in enumerate(batches, 1):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.item())
        if number % BACKWARDS == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert losses == expected_losses
    for parameter, twin in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.detach(), twin)


def accumulate(model, optimizer, times, between=lambda model: None):
    model.eval()
    for batch in numbers(times):
        model(batch.bfloat16()).sum().backward()
        between(model)
    optimizer.step()
    optimizer.wait()
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(times=4, between=lambda model: None, **settings):
    _, model = pair(Residual, dtype=torch.bfloat16, **settings)
    return accumulate(model, stronghold.AdamW(model.parameters(), lr=0.1), times, between)


READS = {
    "norm": lambda p: p.grad.norm().item(),
    "clone": lambda p: p.grad.clone(),
    "a sum": lambda p: torch.zeros(p.shape).add_(p.grad),
    "shape": lambda p: p.grad.shape,
    "print": lambda p: repr(p.grad),
    "foreach": lambda p: torch._foreach_norm([p.grad]),
}


@pytest.mark.parametrize("read", READS)
def test_looking_at_a_sum_changes_nothing(read):
    def look(model):
        for parameter in model.parameters():
            READS[read](parameter)

    assert all(torch.equal(one, other) for one, other in zip(run(between=look), run(), strict=True))


WRITES = {
    "in place": lambda p: p.grad.mul_(2.0),
    "data": lambda p: p.grad.data.mul_(2.0),
    "detach": lambda p: p.grad.detach().mul_(2.0),
    "view": lambda p: p.grad.view(-1).mul_(2.0),
    "numpy": lambda p: p.grad.view(torch.int16).numpy().fill(0x3F00),
    "set": lambda p: setattr(p, "grad", p.grad * 2.0),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 2.0),
    "zero": lambda p: p.grad.zero_(),
    "out": lambda p: torch.mul(p.grad.clone(), 2.0, out=p.grad),
    "index": lambda p: p.grad.__setitem__(0, 2.0),
}


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("write", WRITES)
def test_what_the_user_writes_into_a_gradient_is_what_is_used(write, resident):
    """After a write the gradient is what it shows: neither low halves nor norms from before are used."""
    _, model = pair(Residual, dtype=torch.bfloat16, resident=resident)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.1, max_grad_norm=0.01)
    model.eval()
    for batch in numbers(3):
        model(batch.bfloat16()).sum().backward()
    for parameter in model.parameters():
        WRITES[write](parameter)
        assert grad_meta_of(parameter.grad) is None
    shown = [parameter.grad.float() for parameter in model.parameters()]
    optimizer.step()
    norm = torch.stack([one.double().norm() for one in shown]).norm().item()
    scale = torch.tensor(min(1.0, 0.01 / (norm + 1e-6)))
    for parameter, gradient in zip(model.parameters(), shown, strict=True):
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, (gradient * scale) * 0.1, rtol=1e-6, atol=0.0)


def test_zeroed_in_place_a_sum_begins_anew():
    def zero(model):
        for parameter in model.parameters():
            parameter.grad.zero_()

    _, model = pair(Residual, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.1)
    model.eval()
    first, second = numbers(2)
    model(first.bfloat16()).sum().backward()
    model(first.bfloat16()).sum().backward()
    zero(model)
    model(second.bfloat16()).sum().backward()
    shown = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step()
    for parameter, gradient in zip(model.parameters(), shown, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], gradient.float() * 0.1, rtol=1e-6, atol=0.0)


def test_a_sum_of_many_small_gradients_is_not_lost():
    """600 gradients of one 256th each: a sum in bf16 would stand still at one."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x * self.weight

    model = nn.Sequential(nn.Linear(1, 64), Scale(), Scale())
    stronghold.offload(model, device="cpu", dtype=torch.bfloat16, layers="")
    optimizer = stronghold.AdamW(model.parameters())
    parameter = model[2].weight
    for _ in range(600):
        model[2](torch.full((1, 64), 1 / 256).bfloat16()).sum().backward()
    known = grad_meta_of(parameter.grad)
    assert known is not None and known.remainder is not None
    assert torch.equal(parameter.grad, torch.full((64,), 600 / 256).bfloat16())
    optimizer.step()
    exp_avg = optimizer.state[parameter]["exp_avg"]
    torch.testing.assert_close(exp_avg, torch.full((64,), 60 / 256), rtol=1e-6, atol=0.0)


class Choice(nn.Module):
    """Two weights, of which a pass uses one or both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.first(x) + (self.second(x) if self.both else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_that_one_pass_leaves_out_keeps_its_norm(dtype):
    """What travels with one gradient must not overwrite what is known of its neighbours."""
    torch.manual_seed(0)
    model = nn.Sequential(Choice(), Choice(), Choice())
    stronghold.offload(model, device="cpu", dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), max_grad_norm=1e-3)
    x = torch.randn(4, 8, dtype=dtype)
    for both in (True, False):
        for layer in model:
            layer.both = both
            if not both:
                layer.first.weight.grad = None  # a fresh gradient beside one that stays
        model(x).float().pow(2).sum().backward()
    shown = [p.grad.double().clone() for p in model.parameters()]
    optimizer.step()
    norm = torch.stack([one.norm() for one in shown]).norm().item()
    for parameter, gradient in zip(model.parameters(), shown, strict=True):
        expected = gradient * (1e-3 / (norm + 1e-6)) * 0.1
        rtol = 1e-5 if dtype == torch.float32 else 1e-2  # a sum in bf16 is shown rounded
        torch.testing.assert_close(optimizer.state[parameter]["exp_avg"].double(), expected, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("resident", [0, 2])
def test_a_gradient_that_the_user_put_there_is_added_to(resident):
    _, model = pair(Residual, dtype=torch.bfloat16, resident=resident)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.1)
    own = {p: torch.full(p.shape[::-1], 2.0, dtype=p.dtype).t() if p.ndim == 2 else None for p in model.parameters()}
    model.eval()
    (batch,) = numbers(1)
    model(batch.bfloat16()).sum().backward()
    alone = [p.grad.float().clone() for p in model.parameters()]
    optimizer.zero_grad()
    for parameter, gradient in own.items():
        parameter.grad = gradient
    model(batch.bfloat16()).sum().backward()
    for parameter, gradient in zip(model.parameters(), alone, strict=True):
        before = 2.0 if parameter.ndim == 2 else 0.0
        torch.testing.assert_close(parameter.grad.float(), gradient + before, rtol=2**-8, atol=0.0)
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_added_on_the_host_takes_the_cores_of_an_update(monkeypatch, dtype):
    used = []
    others = threading.enumerate()  # which may still update another test's model; one that ends leaves its number
    for name in ("accumulate", "adamw"):
        original = getattr(native, name)

        def noted(*arguments, threads, original=original):
            if threading.current_thread() not in others:
                used.append(threads)
            return original(*arguments, threads=threads)

        monkeypatch.setattr(native, name, noted)
    _, model = pair(Residual, window=2, dtype=dtype)
    model.into.requires_grad_(False)  # a root parameter's sum is the computation's own work
    model.out.requires_grad_(False)
    optimizer = stronghold.AdamW(model.parameters(), threads=3)
    for batch in numbers(2):
        model(batch.to(dtype)).backward()
    optimizer.step()
    optimizer.wait()
    assert set(used) == {3} and len(used) > len(model.layers)

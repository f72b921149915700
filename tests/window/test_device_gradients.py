"""Gradients that stay on the device, of root and resident layers: added in fp32, whatever ends a backward pass."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stronghold
from stronghold.device import CpuDevice
from stronghold.errors import OffloadedModelError
from stronghold.split import join, rounded
from stronghold.unit import grad_meta_of
from tests.crossed import crossed
from tests.small import Block, Decoder, Residual, numbers, pair, words

ROOTS = ("into.weight", "into.bias", "out.weight", "out.bias")
RESIDENT = ("layers.0.up.weight", "layers.2.norm.bias", "layers.2.down.weight")
"""With two of four layers resident these are 0 and 2."""


@pytest.fixture(autouse=True, params=[True, False], ids=["", "apart"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets root parameters be the host's own memory, and copies as on a device that has memory of its own."""
    monkeypatch.setattr(CpuDevice, "is_host", request.param)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


def offloaded(build=Residual, *, dtype=torch.bfloat16, **settings):
    _, model = pair(build, dtype=dtype, **settings)
    return model.eval()


def batches(count, dtype=torch.bfloat16):
    return [batch.to(dtype) for batch in numbers(count)]


def total(parameter) -> torch.Tensor:
    """Returns the fp32 number that a gradient holds, with its low halves where it has some."""
    known = grad_meta_of(parameter.grad)
    with torch._C.DisableTorchFunctionSubclass():
        shown = parameter.grad.detach().clone()
    return shown.float() if known is None or known.remainder is None else join(shown, known.remainder)


def apart(model, samples) -> dict[str, list[torch.Tensor]]:
    """Returns every backward pass's own gradients, by name; leaves none behind."""
    found = {name: [] for name, _ in model.named_parameters()}
    for sample in samples:
        model(sample).sum().backward()
        for name, parameter in model.named_parameters():
            found[name].append(parameter.grad.detach().clone())
            parameter.grad = None
    return found


def summed(gradients) -> torch.Tensor:
    """Returns their sum in fp32, in their order: by numpy, which knows nothing of halves."""
    result = gradients[0].float().numpy()
    for gradient in gradients[1:]:
        result = result + gradient.float().numpy()
    return torch.from_numpy(result)


# ---- sums ----


@pytest.mark.parametrize("resident", [0, 2, 4])
def test_several_backward_passes_add_up_in_fp32_bit_for_bit(resident):
    model = offloaded(resident=resident)
    samples = batches(5)
    single = apart(model, samples)
    for count, sample in enumerate(samples, 1):
        model(sample).sum().backward()
        for name, parameter in model.named_parameters():
            expected = summed(single[name][:count])
            assert torch.equal(total(parameter), expected), (name, count)
            assert torch.equal(parameter.grad, rounded(expected)), (name, count)
    naive = single["out.weight"][0].clone()
    for gradient in single["out.weight"][1:]:
        naive += gradient
    assert not torch.equal(model.out.weight.grad, naive), "a sum in bf16 must come to something else for this to tell"


@pytest.mark.parametrize("resident", [0, 2, 4])
def test_in_fp32_they_are_plain_pytorchs_to_the_bit(resident):
    plain, model = pair(Residual, resident=resident)
    for one in (plain, model):
        one.eval()
        for sample in numbers(4):
            one(sample).sum().backward()
    for (name, parameter), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, twin.grad), name
        assert parameter.grad.shape == twin.grad.shape


@pytest.mark.parametrize("resident", [0, 2])
def test_the_moments_are_those_of_the_sum_and_the_norm_is_its_norm(resident):
    model = offloaded(resident=resident)
    samples = batches(4)
    expected = {name: summed(gradients) for name, gradients in apart(model, samples).items()}
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, max_grad_norm=0.01)
    for sample in samples:
        model(sample).sum().backward()
    optimizer.step()
    norm = math.sqrt(math.fsum(one.double().square().sum().item() for one in expected.values()))
    scale = torch.tensor(min(1.0, 0.01 / (norm + 1e-6)))
    assert scale < 0.5
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, expected[name] * scale * 0.1, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize(("resident", "set_to_none"), crossed([0, 2], [True, False], together=1))
def test_zeroed_gradients_begin_anew(resident, set_to_none):
    model = offloaded(resident=resident)
    optimizer = stronghold.AdamW(model.parameters())
    samples = batches(5)
    single = apart(model, samples)
    for sample in samples[:3]:
        model(sample).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else not parameter.grad.any()
    for sample in samples[3:]:
        model(sample).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(total(parameter), summed(single[name][3:])), name


@pytest.mark.parametrize("resident", [0, 2])
def test_a_gradient_that_the_user_sets_is_what_is_added_to(resident):
    model = offloaded(resident=resident)
    samples = batches(4)
    single = apart(model, samples)
    for sample in samples[:2]:
        model(sample).sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    for sample in samples[2:]:
        model(sample).sum().backward()
    for name, parameter in model.named_parameters():
        expected = summed([torch.full_like(parameter, 3.0).detach(), *single[name][2:]])
        assert torch.equal(total(parameter), expected), name


@pytest.mark.parametrize("resident", [0, 2])
def test_one_that_is_not_contiguous_is_added_to_as_well(resident):
    model = offloaded(resident=resident)
    (sample,) = batches(1)
    single = apart(model, [sample])
    names = ("into.weight", "out.weight", "layers.0.up.weight")
    for name in names:
        parameter = model.get_parameter(name)
        parameter.grad = torch.full(tuple(parameter.shape)[::-1], 2.0, dtype=torch.bfloat16).t()
    model(sample).sum().backward()
    for name in names:
        torch.testing.assert_close(
            model.get_parameter(name).grad, (single[name][0].float() + 2.0).bfloat16(), rtol=2**-7, atol=0.0
        )


class Regularised(Residual):
    """A term of the loss whose gradient autograd hands out as one number, expanded."""

    def forward(self, x):
        return (self.out.bias.sum() + self.into.weight.sum() + self.layers[0].norm.bias.sum()) / 256


@pytest.mark.parametrize("name", ["out.bias", "into.weight"])
def test_an_expanded_gradient_is_added_in_fp32_too(name):
    """300 times a 256th: a sum in bf16 stands still at one."""
    model = offloaded(Regularised)
    for _ in range(300):
        model(None).backward()
    parameter = model.get_parameter(name)
    assert torch.equal(total(parameter), torch.full(parameter.shape, 300 / 256))


# ---- one parameter, several uses ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_root_parameter_that_is_used_twice_in_one_pass_is_what_plain_pytorch_makes_it(dtype):
    """The words are the head too; both uses come to one gradient, which autograd adds up before anybody sees it."""
    plain, model = pair(Decoder, dtype=dtype)
    for parameter in plain.parameters():
        parameter.data = rounded(parameter.data) if dtype is torch.bfloat16 else parameter.data
    for buffer in (plain, model):
        buffer.angles = buffer.angles.to(dtype)
    samples, single = words(4), []
    for sample in samples:
        for one in (plain, model):
            one(sample).backward()
        assert torch.equal(model.words.weight.grad, plain.words.weight.grad)
        single.append(plain.words.weight.grad.clone())
        plain.zero_grad()
        model.zero_grad()
    for sample in samples:
        model(sample).backward()
    assert model.head.weight is model.words.weight
    assert torch.equal(total(model.words.weight), summed(single))


# ---- hooks of the user ----


@pytest.mark.parametrize("name", ROOTS)
def test_a_hook_on_a_root_parameter_sees_the_sum(name):
    model = offloaded()
    samples, seen = batches(4), []
    single = apart(model, samples)[name]
    parameter = model.get_parameter(name)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for sample in samples:
        model(sample).sum().backward()
    assert len(seen) == 4
    for count, gradient in enumerate(seen, 1):
        assert torch.equal(gradient, rounded(summed(single[:count])))


@pytest.mark.parametrize("name", ROOTS)
def test_a_hook_that_was_there_before_offload_sees_the_sum_too(name):
    torch.manual_seed(0)
    model, seen = Residual().eval(), []
    parameter = model.get_parameter(name)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    stronghold.offload(model, device="cpu", window=2, dtype=torch.bfloat16)
    samples = batches(4)
    single = apart(model, samples)[name]
    seen.clear()
    for sample in samples:
        model(sample).sum().backward()
    assert len(seen) == 4
    for count, gradient in enumerate(seen, 1):
        assert torch.equal(gradient, rounded(summed(single[:count]))), count


@pytest.mark.parametrize("name", ROOTS)
def test_a_hook_that_changes_a_gradient_changes_what_is_added(name):
    model = offloaded()
    samples = batches(3)
    single = apart(model, samples)[name]
    model.get_parameter(name).register_hook(lambda gradient: gradient * 2)
    for sample in samples:
        model(sample).sum().backward()
    assert torch.equal(total(model.get_parameter(name)), summed([2 * gradient for gradient in single]))


@pytest.mark.parametrize("name", ROOTS)
def test_a_hook_that_writes_the_sum_is_heard(name):
    model = offloaded()
    samples = batches(3)
    single = apart(model, samples)[name]
    parameter = model.get_parameter(name)
    zero = False

    def clear(each):
        if zero:
            each.grad.zero_()

    parameter.register_post_accumulate_grad_hook(clear)
    for number, sample in enumerate(samples):
        zero = number == 1
        model(sample).sum().backward()
    assert torch.equal(total(parameter), single[2].float())


def test_a_gradient_asked_for_by_itself_leaves_grad_alone():
    """``torch.autograd.grad`` runs a parameter's hooks, and accumulates nothing."""
    model = offloaded(resident=2)
    samples = batches(3)
    single = apart(model, samples)
    parameters = dict(model.named_parameters())
    for number, sample in enumerate(samples[:2]):
        model(sample).sum().backward()
        for _ in range(2):
            found = torch.autograd.grad(model(samples[2]).sum(), list(parameters.values()))
        for gradient, (name, parameter) in zip(found, parameters.items(), strict=True):
            assert torch.equal(gradient, single[name][2]), name
            assert torch.equal(total(parameter), summed(single[name][: number + 1])), name


def test_a_gradient_asked_for_by_itself_costs_the_next_sum_nothing():
    """The step is the first to look: nobody reads a ``.grad`` in between."""
    model = offloaded(resident=2)
    samples = batches(3)
    single = apart(model, samples)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0)
    model(samples[0]).sum().backward()
    torch.autograd.grad(model(samples[2]).sum(), list(model.parameters()))
    model(samples[1]).sum().backward()
    torch.autograd.grad(model.out(torch.ones(1, 16).bfloat16()).sum(), model.out.weight)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, summed(single[name][:2]) * 0.1, rtol=2e-7, atol=0.0)


def test_gradients_of_a_root_parameter_with_a_graph_stay_autograds_own():
    """Beside the layers second derivatives work as ever."""
    plain = nn.Linear(16, 3).bfloat16()
    model = offloaded()
    plain.load_state_dict(model.out.state_dict())
    x = torch.linspace(-1, 1, 32).view(2, 16).bfloat16()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True")  # torch says it once a process
        for one in (plain, model.out):
            for _ in range(2):
                one(x).square().sum().backward(create_graph=True)
            (one.weight.grad.square().sum() + one.bias.grad.square().sum()).backward()
    assert torch.equal(model.out.weight.grad, plain.weight.grad)
    for one in (plain, model.out):
        one.weight.grad = one.bias.grad = None


# ---- what ends early ----


class UsersError(Exception):
    pass


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        raise UsersError


class Fragile(Residual):
    """Fails in the backward pass before the layer of this number, counted from the end: 0 is the head's input."""

    fails: int | None = None

    def features(self, x):
        x = self.into(x)
        for number, layer in enumerate(self.layers):
            x = _Failing.apply(x) if self.fails == number else x
            x = layer(x)
        x = _Failing.apply(x) if self.fails == len(self.layers) else x
        return self.out(x)


@pytest.mark.parametrize(("fails", "resident"), crossed([0, 1, 2, 3, 4], [0, 2, 4], together=1))
def test_what_a_failed_backward_pass_has_not_reached_is_left_as_it_was(fails, resident):
    """What it has reached holds its gradients, as in plain PyTorch; and the sums go on after it."""
    model = offloaded(Fragile, resident=resident)
    samples = batches(4)
    single = apart(model, samples)
    for sample in samples[:2]:
        model(sample).sum().backward()
    model.fails = fails
    with pytest.raises(UsersError):
        model(samples[2]).sum().backward()
    model.fails = None

    def reached(name):
        return name.startswith("out") or (name.startswith("layers") and int(name.split(".")[1]) >= fails)

    for name, parameter in model.named_parameters():
        expected = summed(single[name][: 3 if reached(name) else 2])
        assert torch.equal(total(parameter), expected), name
    model(samples[3]).sum().backward()
    for name, parameter in model.named_parameters():
        passes = [0, 1, 2, 3] if reached(name) else [0, 1, 3]
        assert torch.equal(total(parameter), summed([single[name][i] for i in passes])), name


def hook_before(parameter, fail):
    return parameter.register_hook(fail)


def hook_behind(parameter, fail):
    return parameter.register_post_accumulate_grad_hook(fail)


def fail(anything):
    raise UsersError


@pytest.mark.parametrize(("name", "register"), crossed([*ROOTS, *RESIDENT], [hook_before, hook_behind], together=1))
def test_a_hook_that_fails_loses_no_gradient(name, register):
    """Of the parameter that it is on, the sum from before is left, or the one that the hook saw."""
    model = offloaded(resident=2)
    samples = batches(4)
    single = apart(model, samples)
    for sample in samples[:2]:
        model(sample).sum().backward()
    parameter = model.get_parameter(name)
    model(samples[3])  # what is hooked for the engine is hooked
    handle = register(parameter, fail)
    with pytest.raises(UsersError):
        model(samples[2]).sum().backward()
    handle.remove()
    for other, each in model.named_parameters():
        assert each.grad is not None, other
        before, behind = summed(single[other][:2]), summed(single[other][:3])
        assert torch.equal(total(each), before) or torch.equal(total(each), behind), other
    with_it = torch.equal(total(parameter), summed(single[name][:3]))
    assert register is hook_behind or not with_it
    model(samples[3]).sum().backward()
    passes = [0, 1, 2, 3] if with_it else [0, 1, 3]
    assert torch.equal(total(parameter), summed([single[name][i] for i in passes]))


@pytest.mark.parametrize("name", [*ROOTS, *RESIDENT])
def test_dropped_after_a_hook_has_failed_a_gradient_stays_dropped(name):
    model = offloaded(resident=2)
    samples = batches(3)
    single = apart(model, samples)
    parameter = model.get_parameter(name)
    model(samples[0]).sum().backward()
    handle = parameter.register_hook(fail)
    with pytest.raises(UsersError):
        model(samples[1]).sum().backward()
    handle.remove()
    assert parameter.grad is not None
    model.zero_grad()
    assert [other for other, each in model.named_parameters() if each.grad is not None] == []
    model(samples[2]).sum().backward()
    assert torch.equal(total(parameter), single[name][2].float())


def test_zero_grad_after_a_failed_pass_leaves_nothing_of_it():
    model = offloaded(Fragile, resident=2)
    optimizer = stronghold.AdamW(model.parameters())
    samples = batches(3)
    single = apart(model, samples)
    for set_to_none in (True, False):
        model(samples[0]).sum().backward()
        model.fails = 2
        with pytest.raises(UsersError):
            model(samples[1]).sum().backward()
        model.fails = None
        optimizer.zero_grad(set_to_none=set_to_none)
        model(samples[2]).sum().backward()
        for name, parameter in model.named_parameters():
            assert torch.equal(total(parameter), single[name][2].float()), name
        optimizer.zero_grad()


# ---- frozen, sparse ----


def test_a_frozen_root_parameter_gets_no_gradient_and_once_unfrozen_its_own_sum():
    def build():
        model = Residual()
        model.out.requires_grad_(False)
        model.into.weight.requires_grad_(False)
        return model

    model = offloaded(build)
    samples = batches(5)
    model(samples[0]).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["into.weight", "out.weight", "out.bias"]
    model.requires_grad_(True)
    model.zero_grad()
    single = apart(model, samples)
    for sample in samples:
        model(sample).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(total(parameter), summed(single[name])), name
    held = total(model.out.weight)
    model.out.requires_grad_(False)
    model(samples[0]).sum().backward()
    assert torch.equal(total(model.out.weight), held), "frozen again it keeps what it had"


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(5, 16, sparse=True)

    def forward(self, x):
        return x + self.words(torch.tensor([0, 1, 2, 3, 4, 4]))


@pytest.mark.parametrize("passes", [1, 3])
def test_a_sparse_gradient_of_a_root_parameter_is_refused_by_the_step_and_changes_nothing(passes):
    class Model(Residual):
        def __init__(self):
            super().__init__()
            self.words = Sparse()

        def features(self, x):
            return super().features(self.words(x))

    model = offloaded(Model, resident=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.1)
    for sample in batches(passes):
        model(sample).sum().backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(OffloadedModelError, match=r"words.words.weight has a gradient of layout .*sparse=False"):
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not optimizer.state_dict()["state"]
    optimizer.zero_grad()
    model.words.words.weight.requires_grad_(False)
    model(batches(1)[0]).sum().backward()
    optimizer.step()
    assert not torch.equal(model.out.weight, before["out.weight"])


@pytest.mark.parametrize("resident", [0, 1, 3])
def test_a_sparse_gradient_of_a_layer_is_refused_by_the_backward_pass(resident):
    class Layer(Block):
        def __init__(self):
            super().__init__()
            self.sparse = Sparse()

        def forward(self, x):
            return super().forward(self.sparse(x))

    model = offloaded(lambda: Residual(layers=3, block=Layer), resident=resident, dtype=torch.float32)
    stronghold.AdamW(model.parameters())
    with pytest.raises(OffloadedModelError, match=r"layers.2 produced a gradient of layout .*sparse=False"):
        model(numbers(1)[0]).sum().backward()
    for layer in model.layers:
        layer.sparse.words.sparse = False
    model.zero_grad()
    model(numbers(1)[0]).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# ---- gradients that are kept aside ----


@pytest.mark.parametrize("resident", [0, 2, 4])
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_is_kept_and_put_back_is_what_it_was(passes, resident):
    """As in gradient surgery: one task's gradients are set aside while another's are computed."""
    model = offloaded(resident=resident)
    samples = batches(4)
    single = apart(model, samples)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, max_grad_norm=0.01)
    for sample in samples[:passes]:
        model(sample).sum().backward()
    kept = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for sample in samples[2:]:
        model(sample * 5).sum().backward()
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    expected = {name: summed(gradients[:passes]) for name, gradients in single.items()}
    # Either the whole sum, or what it shows of it: not the low halves of another.
    used = {name: total(parameter) for name, parameter in model.named_parameters()}
    for name, value in used.items():
        assert any(torch.equal(value, one) for one in (expected[name], rounded(expected[name]).float())), name
    optimizer.step()
    norm = math.sqrt(math.fsum(one.double().square().sum().item() for one in used.values()))
    scale = torch.tensor(min(1.0, 0.01 / (norm + 1e-6)))
    for name, parameter in model.named_parameters():
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, used[name] * scale * 0.1, rtol=2e-7, atol=0.0)


@pytest.mark.parametrize("resident", [0, 2])
def test_the_norm_of_a_gradient_that_is_kept_is_its_own(resident):
    """One of a layer's gradients is kept; the others' next squares come down in one piece with what was its own."""
    model = offloaded(resident=resident, dtype=torch.float32)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, max_grad_norm=0.01)
    first, second = numbers(2)
    model(first).sum().backward()
    weights = [layer.up.weight for layer in model.layers]
    kept = [parameter.grad for parameter in weights]
    expected = [gradient.detach().clone() for gradient in kept]
    model.zero_grad()
    model(second * 50).sum().backward()
    model.zero_grad()
    for parameter, gradient in zip(weights, kept, strict=True):
        parameter.grad = gradient
    optimizer.step()
    norm = math.sqrt(math.fsum(one.double().square().sum().item() for one in expected))
    for parameter, gradient in zip(weights, expected, strict=True):
        moment = optimizer.state[parameter]["exp_avg"]
        torch.testing.assert_close(moment, gradient * (0.01 / (norm + 1e-6)) * 0.1, rtol=1e-5, atol=0.0)


def test_gradients_of_resident_layers_are_on_the_device_and_of_the_compute_type():
    model = offloaded(resident=2)
    model(batches(1)[0]).sum().backward()
    for name in (*ROOTS, *RESIDENT):
        gradient = model.get_parameter(name).grad
        assert gradient.dtype is torch.bfloat16
        assert gradient.shape == model.get_parameter(name).shape
        assert gradient.device == model.get_parameter(name).device


def test_the_loss_of_a_model_with_resident_layers_is_the_same():
    plain, model = pair(Decoder, resident=3)
    for sample in words(2):
        assert torch.equal(model(sample), plain(sample))
        assert torch.equal(
            F.log_softmax(model.head(torch.ones(1, 16)), -1), F.log_softmax(plain.head(torch.ones(1, 16)), -1)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_stay_in_the_memory_that_the_user_gave_them(dtype):
    model = offloaded(dtype=dtype, window=1, resident=2)
    parameters = [*model.parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=dtype)
    views = [part.view_as(p) for part, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = view
    for batch in batches(2, dtype):
        model(batch).sum().backward()
    flat.mul_(0.5)  # as a mean over processes would be taken of all of them at once
    for (name, parameter), view in zip(model.named_parameters(), views, strict=True):
        assert parameter.grad.data_ptr() == view.data_ptr(), name
        assert torch.equal(parameter.grad, view), name

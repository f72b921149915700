"""The chunked loss against PyTorch's own, which holds all logits at once."""

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stronghold.lab.models import cross_entropy
from stronghold.lab.models.cross_entropy import linear_cross_entropy


@pytest.fixture(autouse=True, params=[None, 100], ids=["one block", "blocks"])
def block_bytes(request, monkeypatch):
    """The weight's gradient in one block, and in blocks of a few rows whose last one is cut short."""
    if request.param is not None:
        monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", request.param)


def inputs(tokens=13, width=8, vocabulary=11, dtype=torch.float64, ignored=(2, 7, 12)):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    labels[list(ignored)] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def reference(hidden, weight, labels, upstream=1.0):
    hidden = hidden.detach().clone().requires_grad_()
    weight = weight.detach().clone().requires_grad_()
    loss = F.cross_entropy(hidden @ weight.T, labels)
    (loss * upstream).backward()
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 4, 5, 13, 100, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_loss_and_gradients_are_pytorchs_under_a_scaled_upstream_gradient(chunk, dtype, tolerance):
    hidden, weight, labels = inputs(dtype=dtype)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=chunk)
    (loss * 0.375).backward()
    expected = reference(hidden, weight, labels, upstream=0.375)
    for got, want in zip((loss.detach(), hidden.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance * 10, atol=tolerance)
    assert torch.equal(hidden.grad[[2, 7, 12]], torch.zeros(3, 8, dtype=dtype))


def test_gradcheck():
    hidden, weight, labels = inputs(tokens=6, width=3, vocabulary=5, ignored=(1,))
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, chunk=2), (hidden, weight))


def test_backward_twice_gives_the_same_gradients_twice():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4)
    first = torch.autograd.grad(loss * 3, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (hidden, weight))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_right_one(frozen):
    hidden, weight, labels = inputs()
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    linear_cross_entropy(hidden, weight, labels, chunk=5).backward()
    if frozen == "hidden":
        assert hidden.grad is None
        torch.testing.assert_close(weight.grad, weight_grad)
    else:
        assert weight.grad is None
        torch.testing.assert_close(hidden.grad, hidden_grad)


def test_without_grad_the_loss_is_the_same_and_no_gradient_is_made():
    hidden, weight, labels = inputs()
    expected = linear_cross_entropy(hidden, weight, labels, chunk=4)
    with torch.no_grad(), Products() as products:
        loss = linear_cross_entropy(hidden, weight, labels, chunk=4)
    assert torch.equal(loss, expected)
    assert not loss.requires_grad
    assert products.count == 4  # one per chunk: the logits


def test_bf16_is_as_close_as_pytorchs_own_and_the_weight_gradient_is_summed_in_fp32():
    hidden, weight, labels = inputs(tokens=512, width=16, vocabulary=32, dtype=torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk=2)
    loss.backward()
    exact = reference(hidden.double(), weight.double(), labels)
    plain = reference(hidden, weight, labels)
    assert loss.dtype == torch.float32
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), exact[0], rtol=2e-2, atol=0, check_dtype=False)
    for got, want, theirs in zip((hidden.grad, weight.grad), exact[1:], plain[1:], strict=True):
        worst = (theirs.double() - want).abs().max()
        assert (got.double() - want).abs().max() <= 1.5 * worst + 1e-6


def test_under_autocast_the_products_run_in_bf16_and_gradients_keep_their_dtype():
    hidden, weight, labels = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=4)
    loss.backward()
    low = linear_cross_entropy(hidden.detach().bfloat16(), weight.detach().bfloat16(), labels, chunk=4)
    assert torch.equal(loss.detach(), low)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32
    _, hidden_grad, weight_grad = reference(hidden, weight, labels)
    torch.testing.assert_close(hidden.grad, hidden_grad, rtol=0.05, atol=2e-3)
    torch.testing.assert_close(weight.grad, weight_grad, rtol=0.05, atol=5e-3)


def test_all_ignored_is_what_pytorch_says():
    hidden, weight, labels = inputs(ignored=range(13))
    loss = linear_cross_entropy(hidden, weight, labels, chunk=4)
    loss.backward()
    expected, hidden_grad, weight_grad = reference(hidden, weight, labels)
    assert loss.isnan()
    assert expected.isnan()
    assert torch.equal(hidden.grad, hidden_grad)
    assert torch.equal(weight.grad, weight_grad)


def test_large_logits_do_not_overflow():
    hidden, weight, labels = inputs(dtype=torch.float32)
    scaled = (hidden.detach() * 1e4).requires_grad_()
    loss = linear_cross_entropy(scaled, weight, labels, chunk=4)
    loss.backward()
    expected, hidden_grad, _ = reference(scaled, weight, labels)
    torch.testing.assert_close(loss.detach(), expected)
    torch.testing.assert_close(scaled.grad, hidden_grad, rtol=1e-5, atol=1e-5)


def test_no_tensor_is_as_large_as_all_logits():
    hidden, weight, labels = inputs(tokens=64, width=4, vocabulary=512, dtype=torch.float32)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=16).backward()
    assert largest.elements == 16 * 512


def test_shapes_that_do_not_fit_are_refused():
    hidden, weight, labels = inputs()
    with pytest.raises(ValueError, match=r"\(13, 8\), \(11, 8\) and \(12,\)"):
        linear_cross_entropy(hidden, weight, labels[1:])


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation has made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


class Products(TorchFunctionMode):
    """Counts matrix products."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__ in ("matmul", "__matmul__", "addmm_", "mm")
        return func(*args, **(kwargs or {}))

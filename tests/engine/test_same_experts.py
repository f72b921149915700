"""Experts that add up in another way than parts do are refused before a number is wrong, and no others."""

from __future__ import annotations

import copy
import threading
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.openai_privacy_filter.modeling_openai_privacy_filter import OpenAIPrivacyFilterExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import stronghold
from stronghold.engine import same_experts
from stronghold.errors import OffloadedModelError

EXPERTS, HIDDEN, INNER = 8, 32, 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Config(SimpleNamespace):
    def __init__(self, how: str = "eager") -> None:
        counts = dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), EXPERTS)
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER}
        kinds = {"hidden_act": "silu", "mlp_hidden_act": "silu", "moe_latent_size": None}
        caps = {"swiglu_alpha": 1.7, "swiglu_limit": 7.0, "mlp_gate_softcap": 10.0, "mlp_up_softcap": 10.0}
        super().__init__(**counts, **sizes, **kinds, **caps, _experts_implementation=how)


def inkling2_experts() -> Any:
    """Returns the class. requirements.txt has an earlier transformers for Python 3.10."""
    module = "transformers.models.inkling2.modeling_inkling2"
    return pytest.importorskip(module, reason="transformers has Inkling2 from 5.23 on").Inkling2Experts


class Own(nn.Module):
    """A user's class. ``add_up``: the type in which it adds up, None for that which it computes in."""

    def __init__(self, add_up: torch.dtype | str | None = "tokens", dropout: float = 0.0) -> None:
        super().__init__()
        self.num_experts, self.add_up, self.dropout = EXPERTS, add_up, nn.Dropout(dropout)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER) * 0.3)

    def expert(self, number: int, rows: Tensor) -> Tensor:
        inner = torch.relu(nn.functional.linear(rows, self.up[number]))
        return nn.functional.linear(self.dropout(inner), self.down[number])

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        total = None
        for number in range(self.num_experts):
            choice, token = torch.where((index == number).t())
            if len(token):
                one = self.expert(number, hidden_states[token])
                one = one * weights[token, choice, None].to(one.dtype)
                if total is None:
                    add_up = hidden_states.dtype if self.add_up == "tokens" else self.add_up or one.dtype
                    total = torch.zeros_like(hidden_states, dtype=add_up)
                total.index_add_(0, token, one.to(total.dtype))
        return hidden_states * 0 if total is None else total.to(hidden_states.dtype)


class Layer(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, EXPERTS, bias=False), experts

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).float().softmax(-1).topk(4)
        return x + self.experts(x, index, weights)


def drawn(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(dtype: torch.dtype, weighted: torch.dtype, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    weights, index = torch.rand(40, EXPERTS, generator=generator).topk(choices)
    return torch.randn(40, HIDDEN, generator=generator).to(dtype), index, weights.to(weighted)


def split(experts: nn.Module, number: int = 3) -> nn.Module:
    return stronghold.split_experts(nn.Sequential(copy.deepcopy(experts)), number)[0]


@pytest.mark.parametrize("choices", [1, 2, 4])
@pytest.mark.parametrize("weighted", ["own", FP32])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(
    "make",
    [
        *(lambda kind=kind: kind(Config()) for kind in (Qwen3MoeExperts, NemotronHExperts)),
        lambda: inkling2_experts()(Config()),
        lambda: OpenAIPrivacyFilterExperts(Config()),
        Own,
        lambda: Own(FP32),
        lambda: Own(FP16),
    ],
    ids=["qwen3", "nemotron_h", "inkling2", "privacy_filter", "own", "own in fp32", "own in fp16"],
)
def test_those_whose_numbers_differ_are_refused_and_no_others(make, dtype, weighted, choices):
    whole = drawn(make()).to(dtype)
    given = inputs(dtype, dtype if weighted == "own" else weighted, choices)
    parts = split(whole)
    expected, got = whole(*given), parts._in_order(*given)
    if torch.equal(expected, got):
        assert torch.equal(parts(*given), expected)
    else:
        with pytest.raises(OffloadedModelError, match=rf"{type(whole).__name__}, .*differ .*grouped_mm"):
            parts(*given)


@pytest.mark.parametrize("add_up", ["tokens", None])
def test_under_autocast_those_that_add_up_in_its_type_are_refused(add_up):
    whole = drawn(Own(add_up))
    given = inputs(FP32, FP32, 4)
    parts = split(whole)
    assert torch.equal(parts(*given), whole(*given))
    with torch.autocast("cpu", BF16):
        expected = whole(*given)
        if add_up == "tokens":
            assert torch.equal(parts(*given), expected)
        else:
            assert not torch.equal(parts._in_order(*given), expected)
            with pytest.raises(OffloadedModelError, match=r"autocast in torch\.bfloat16"):
                parts(*given)


@pytest.mark.parametrize("store", ["ram", "disk"])
@pytest.mark.parametrize("kind", [NemotronHExperts, Own])
def test_an_offloaded_model_is_refused_before_its_first_step(kind, store, tmp_path):
    row = nn.Sequential(*(Layer(kind(Config()) if kind is NemotronHExperts else Own(FP32)) for _ in range(2)))
    of = stronghold.offload(
        drawn(row),
        layers="",
        device="cpu",
        window=1,
        dtype=BF16,
        experts_per_part=3,
        store=store if store == "ram" else tmp_path,
    )
    before = copy.deepcopy(of.state_dict())
    with pytest.raises(OffloadedModelError, match=rf"{kind.__name__}, which adds up otherwise.*torch.bfloat16, 4 ex"):
        of(torch.randn(10, HIDDEN, dtype=BF16))
    assert all(torch.equal(value, before[name]) for name, value in of.state_dict().items())


def test_the_remedies_compute_what_the_whole_computes():
    x = torch.randn(10, HIDDEN, dtype=BF16)
    for how, number in (("grouped_mm", 3), ("eager", None)):
        whole = drawn(nn.Sequential(*(Layer(NemotronHExperts(Config(how))) for _ in range(2)))).to(BF16)
        expected = whole(x)
        of = stronghold.offload(whole, layers="", device="cpu", window=1, experts_per_part=number)
        assert torch.equal(of(x), expected)


def test_nothing_of_the_users_is_touched():
    """Neither random states, nor attributes, nor hooks, nor what autograd is told to do with saved tensors."""
    calls: list[int] = []
    saved: list[int] = []

    class Counting(Own):
        def __init__(self) -> None:
            super().__init__(dropout=0.5)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            self.seen += 1
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(hidden_states, index, weights)

    whole = drawn(Counting())
    whole.register_forward_hook(lambda *_: calls.append(1))
    parts, given = split(whole), inputs(FP32, FP32, 2)
    found = []
    for compute in (parts, parts._in_order):  # the second as if nothing were compared
        torch.manual_seed(5)
        calls.clear()
        saved.clear()
        seen = [part.experts.seen.item() for part in parts.parts]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(1) or t, lambda t: t):
            output = compute(*(one.clone() for one in given))
        found.append((output, torch.rand(2), len(calls), len(saved)))
        assert len(calls) == 3
        assert sum(part.experts.seen.item() for part in parts.parts) - sum(seen) <= 3 * 3
    (first, *before), (second, *after) = found
    assert torch.equal(first, second)
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert [vars(part.experts)["calls"] for part in parts.parts] == [2] * 3


def test_it_takes_the_memory_of_one_expert_and_is_done_once_for_a_class():
    strides: list[int] = []
    rows: list[int] = []

    class Looking(Own):
        def expert(self, number: int, some: Tensor) -> Tensor:
            strides.append(self.up.stride(0))
            rows.append(len(some))
            return super().expert(number, some)

    parts, given = split(drawn(Looking())), inputs(FP32, FP32, 2)
    parts(*given)
    compared = [row for row, stride in zip(rows, strides, strict=True) if stride == 0]
    assert sum(compared) == 2 * 2 * (8192 // HIDDEN)  # both computations, two experts for each token
    rows.clear()
    strides.clear()
    split(drawn(Looking()))(*given)
    assert 0 not in strides


@pytest.mark.parametrize("around", ["checkpoint", "inference", "no_grad"])
def test_around_it_there_may_be_anything(around):
    class Another(Own):
        pass

    whole, given = drawn(Another()), inputs(FP32, FP32, 2)
    parts = split(whole)

    def compute(of: nn.Module) -> Any:
        if around == "checkpoint":
            x = given[0].clone().requires_grad_()
            output = checkpoint(of, x, *given[1:], use_reentrant=False)
            return output, *torch.autograd.grad(output.square().sum(), [x])
        with torch.inference_mode() if around == "inference" else torch.no_grad():
            return (of(*given),)

    assert all(torch.equal(*pair) for pair in zip(compute(whole), compute(parts), strict=True))


def threads_of_comparisons(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns where the threads come that compare, one for each comparison."""
    threads: list[int] = []
    of_one = same_experts._of_one
    monkeypatch.setattr(same_experts, "_of_one", lambda *rest: threads.append(threading.get_ident()) or of_one(*rest))
    return threads


def gradients_of(experts: nn.Module, given: tuple[Tensor, ...], between: Any = None, **how: Any) -> list[Tensor]:
    x = given[0].clone().requires_grad_()
    output = checkpoint(experts, x, *given[1:], **how)
    if between is not None:
        between()
    output.square().sum().backward()
    return [output, x.grad]


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint_it_is_done_in_the_forward_pass(monkeypatch, reentrant):
    """The second run of a reentrant one, the first to have gradients, waited for autograd's thread, which it was in."""

    class Within(Own):
        pass

    threads = threads_of_comparisons(monkeypatch)
    whole, given = drawn(Within()), inputs(FP32, FP32, 2)
    parts, compared = split(whole), []
    found = gradients_of(parts, given, lambda: compared.extend(threads), use_reentrant=reentrant)
    assert len(threads) == len(compared) == 1
    assert threads[0] != threading.get_ident()
    expected = gradients_of(whole, given, use_reentrant=reentrant)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "how",
    [
        {"use_reentrant": True},
        {"use_reentrant": False},
        {
            "use_reentrant": False,
            "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]),
        },
    ],
    ids=["reentrant", "not reentrant", "selective"],
)
def test_in_a_backward_pass_it_is_done_in_the_thread_that_is_there(monkeypatch, how):
    """Another would wait for autograd's thread of a device. What the checkpoint saves and caches stays as it is."""

    class Switched(Own):
        pass

    threads = threads_of_comparisons(monkeypatch)
    whole, given = drawn(Switched()), inputs(FP32, FP32, 2)
    parts = split(whole)

    def switch() -> None:
        for part in parts.parts:
            part.experts.train(False)  # a flag of another value

    found = gradients_of(parts, given, switch, **how)
    assert [thread == threading.get_ident() for thread in threads] == [False, True]
    assert all(torch.equal(*pair) for pair in zip(found, gradients_of(whole, given, **how), strict=True))


def test_not_a_number_is_equal_to_itself():
    class Rooting(Own):
        def expert(self, number: int, rows: Tensor) -> Tensor:
            return super().expert(number, rows).sqrt()

    whole, given = drawn(Rooting()), inputs(FP32, FP32, 2)
    expected = whole(*given)
    assert expected.isnan().any()
    assert torch.equal(split(whole)(*given).nan_to_num(7.0), expected.nan_to_num(7.0))


class WithBuffer(Own):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(EXPERTS, HIDDEN))


class WithChild(Own):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ParameterDict({"weight": nn.Parameter(torch.ones(EXPERTS, HIDDEN))})


@pytest.mark.parametrize("kind", [WithBuffer, WithChild])
def test_what_is_not_cut_with_the_experts_may_not_be_theirs(kind):
    with pytest.raises(ValueError, match=r"parameters of its own alone.* no buffer"):
        split(kind())


def test_another_forward_on_an_instance_is_refused():
    """It would compute with the weights of the whole, whose experts have other numbers."""
    whole = Own()
    whole.forward = MethodType(Own.forward, whole)
    with pytest.raises(ValueError, match="got another on an instance of Own"):
        split(whole)


def test_a_class_that_transformers_has_not_wrapped_adds_up_as_it_is_written():
    """Whatever the model's configuration says, which the class may hold."""
    whole = drawn(Own()).to(BF16)
    whole.config = Config("grouped_mm")
    given = inputs(BF16, FP32, 4)
    assert torch.equal(split(whole)(*given), whole(*given))


def test_a_parameter_may_be_none():
    whole = drawn(Own())
    whole.register_parameter("bias", None)
    given, parts = inputs(FP32, FP32, 2), split(whole)
    assert torch.equal(parts(*given), whole(*given))
    assert [*parts.state_dict()] == [*whole.state_dict()]

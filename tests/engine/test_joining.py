"""What a layer returns for its micro-batches, and writes into its arguments, put together as one run's."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

import stronghold
from stronghold.engine.joining import Joiner, join
from tests.small import LENGTH, SIZE, assert_close, assert_same_models, numbers, pair

Pair = namedtuple("Pair", ["one", "other"])
LEADERS = [(2, 3, 2), (2, 3, 2)]


@dataclass
class Output:
    hidden: Tensor
    weight: Tensor | None = None


@dataclass
class Derived:
    hidden: Tensor
    doubled: Tensor = field(init=False)
    found: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.hidden


class Slots:
    __slots__ = ("kind", "states")

    def __init__(self, states: Tensor) -> None:
        self.states, self.kind = states, "slots"


def test_outputs_are_put_together_in_their_containers():
    whole, flat, bias = torch.randn(5, 3, 2), torch.randn(15, 4), torch.randn(1, 2, 3, 3)
    leaders = [(2, 3, 2), (2, 3, 2), (1, 3, 2)]

    def outputs(make):
        return [make(whole[i : i + 2], flat[3 * i : 3 * i + 6]) for i in (0, 2, 4)]

    got = join(outputs(lambda x, f: (x, {"flat": f, "none": None}, [bias.clone(), 3], Pair(x, "text"))), leaders)
    assert isinstance(got[3], Pair)
    assert_close([got[0], got[1]["flat"], got[2][0], got[3].one], [whole, flat, bias, whole])
    assert (got[1]["none"], got[2][1], got[3].other) == (None, 3, "text")
    assert_close(join(outputs(lambda x, f: Output(x)), leaders).hidden, whole)
    ordered = join(outputs(lambda x, f: OrderedDict(x=x)), leaders)
    assert isinstance(ordered, OrderedDict)
    assert_close(ordered["x"], whole)
    assert_close(join([whole[:2, 0, 0], whole[2:, 0, 0]], [(2, 3), (3, 3)]), whole[:, 0, 0])


def test_objects_are_put_together_too():
    """Of the first micro-batch alone, they would have its samples only."""
    one, other = torch.randn(2, 3, 2).unbind(0)
    (states, queue) = join([(Slots(one), deque([one], 4)), (Slots(other), deque([other], 4))], [(3, 2), (3, 2)])
    assert type(states) is Slots and states.kind == "slots"
    assert type(queue) is deque and queue.maxlen == 4
    assert_close([states.states, queue[0]], [torch.cat([one, other])] * 2)
    derived = [Derived(one), Derived(other)]
    for item in derived:
        item.found = [item.hidden + 1]
    got = join(derived, [(3, 2), (3, 2)])
    assert_close([got.doubled, *got.found], [2 * got.hidden, got.hidden + 1])
    derived[0].found = derived[1].found = 7
    with pytest.raises(ValueError, match="number 7 for each of its micro-batches, in found"):
        join(derived, [(3, 2), (3, 2)])


@pytest.mark.parametrize(
    "output", [torch.tensor(1.0), torch.randn(4), torch.randn(4, 7), torch.randn(3, 2), torch.randn(1, 3, 3)]
)
def test_outputs_without_a_batch_are_taken_once_where_they_are_the_same(output):
    """Others are loads of experts, averaged losses: only the layer itself could say what they are together."""
    assert join([output, output], LEADERS) is output
    assert join([output, output.clone()], LEADERS) is output
    with pytest.raises(ValueError, match="first dimension is not the batch, and it is not the same"):
        join([output, output + 1], LEADERS)
    bias = [output.clone().requires_grad_() for _ in range(2)]
    if output.ndim > 1 and len(output) == 1:
        assert join(bias, LEADERS) is bias[0]
    else:  # the gradients of others may differ even so
        with pytest.raises(ValueError, match="first dimension is not the batch"):
            join(bias, LEADERS)


def test_values_that_are_no_number_are_the_same():
    one = torch.tensor([[float("nan"), float("inf")]])
    assert join([one, one.clone()], LEADERS) is one
    with pytest.raises(ValueError, match="not the same"):
        join([one, torch.tensor([[1.0, float("inf")]])], LEADERS)


def test_a_loss_of_one_element_is_not_taken_for_one_of_a_sample():
    with pytest.raises(ValueError, match=r"shape \(1,\) .* micro_batch of two samples or more"):
        join([torch.randn(1), torch.randn(1)], [(1, 3, 2), (1, 3, 2)])


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        ([3, 4], "3, 4"),
        ([2, 2], "the number 2, which may be that of the samples"),
        ([torch.Size([2, 3]), torch.Size([2, 3])], "may be of a micro-batch"),
        ([None, torch.randn(2)], "NoneType, Tensor"),
        (["one", "other"], "one, other"),
        ([[None], [None, None]], "1, 2"),
        ([{"one": None}, {"other": None}], "one.*other"),
        ([np.zeros(2), np.zeros(2)], "another ndarray"),
        ([iter([]), iter([])], "another list_iterator"),
        ([nn.Linear(1, 1), nn.Linear(1, 1)], "Linear"),
        ([{1}, {2}], r"\{1\}, \{2\}"),
    ],
    ids=["numbers", "size", "Size", "None", "texts", "lengths", "keys", "arrays", "iterators", "modules", "sets"],
)
def test_what_cannot_be_put_together_is_refused(outputs, told):
    with pytest.raises(ValueError, match=f"outputs together .*{told}.*offload without micro_batch"):
        join(outputs, LEADERS)


def test_a_number_that_is_not_that_of_every_micro_batch_counts_no_samples():
    assert join([4, 4], [(4, 3), (2, 3)]) == 4
    with pytest.raises(ValueError, match="number 4, which may be that of the samples"):
        join([4, 4], [(4, 3), (4, 3)])
    assert Joiner([(4, 3), (4, 3)], own=lambda: {4}).join([4, 4]) == 4


def test_what_is_the_same_is_taken_once():
    for output in (3, 2.5, True, "text", None, torch.float32, frozenset({1}), (3, 4), torch.Size([3, 4])):
        assert join([output, output], LEADERS) == output


class Store:
    """What layers write into, of a class that we do not know."""

    def __init__(self) -> None:
        self.states: dict[int, Tensor] = {}
        self.last: Tensor | None = None
        self.calls = 0


class Writing(nn.Module):
    def __init__(self, write: Any) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(SIZE, SIZE), write

    def forward(self, x: Tensor, *given: Any, **named: Any) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.write(y, *given, **named)
        return x + y


class Row(nn.Module):
    """Layers that are called with what ``make`` makes; the loss is ``also`` of what they have written into it."""

    def __init__(self, write: Any, make: Any, also: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Writing(write) for _ in range(3))
        self.make, self.also = make, also

    def forward(self, x: Tensor) -> Tensor:
        given = self.make(x)
        for layer in self.layers:
            x = layer(x, given)
        return x.square().mean() + self.also(given)


def grow(y: Tensor, given: list) -> None:
    given.append((y, "text"))


def put_into_object(y: Tensor, store: Store) -> None:
    store.states[store.calls] = y if store.last is None else y * store.last
    store.last, store.calls = y, store.calls + 1


def put_within(y: Tensor, given: dict) -> None:
    given.setdefault("seen", []).append(y)
    given["store"].append(Store())
    given["store"][-1].last = y
    given["store"][0].last = y * given["x"]
    given["names"].add(f"{len(given['seen'])}")
    given.pop("gone", None)


def squares(*tensors: Tensor) -> Tensor:
    return sum((number + 1) * tensor.square().mean() for number, tensor in enumerate(tensors))


def sum_within(given: dict) -> Tensor:
    assert given["names"] == {"1", "2", "3"} and "gone" not in given
    assert given["store"][0] is given["first"]
    return squares(*given["seen"], *(store.last for store in given["store"]))


def make_within(x: Tensor) -> dict:
    store = Store()
    return {"x": x, "store": deque([store]), "first": store, "names": set(), "gone": 1}


WRITES = {
    "list": (grow, lambda x: [], lambda given: squares(*(y for y, _ in given))),
    "object": (put_into_object, lambda x: Store(), lambda s: s.calls * squares(*s.states.values(), s.last)),
    "within": (put_within, make_within, sum_within),
}


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("kind", WRITES)
def test_what_layers_write_into_their_arguments_is_that_of_one_run(kind, samples, activations):
    plain, model = pair(lambda: Row(*WRITES[kind]), micro_batch=samples, activations=activations, window=1)
    for batch in numbers(2):
        losses = [one(batch) for one in (model, plain)]
        assert_close(*losses)
        for loss in losses:
            loss.backward()
    assert_same_models(model, plain)


def average(y: Tensor, given: list | dict | Store) -> None:
    loss = y.square().mean()
    if isinstance(given, list):
        given.append(loss)
    elif isinstance(given, dict):
        given["loss"] = given["loss"] + loss
    else:
        given.last = loss


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("make", [list, Store, lambda: {"loss": torch.zeros(())}], ids=["list", "object", "dict"])
def test_an_averaged_loss_among_the_arguments_is_refused_and_not_lost(make, activations):
    kept = []

    def given(x: Tensor) -> Any:
        kept.append(make())
        return kept[-1]

    plain, model = pair(lambda: Row(average, given, lambda _: 0.0), micro_batch=2, activations=activations)
    (x,) = numbers(1)
    with pytest.raises(
        ValueError, match=r"writes into a (list|Store|dict) among its arguments .*shape \(\).*offload w"
    ):
        model(x)
    whole = make()
    assert repr(vars(kept[0]) if isinstance(kept[0], Store) else kept[0]) == repr(
        vars(whole) if isinstance(whole, Store) else whole
    )
    _, model = pair(lambda: Row(average, given, lambda _: 0.0), micro_batch=4, activations=activations)
    assert_close(model(x), plain(x))


def count(y: Tensor, given: dict) -> None:
    given["samples"] += len(y)


def add_in_place(y: Tensor, given: Tensor) -> None:
    given.add_(y.detach().mean())


def test_counts_and_writes_in_place_are_refused():
    (x,) = numbers(1)
    model = pair(lambda: Row(count, lambda x: {"samples": 0}, lambda given: given["samples"]), micro_batch=2)[1]
    with pytest.raises(ValueError, match="number 2 in place of 0: it may count samples"):
        model(x)
    model = pair(lambda: Row(add_in_place, lambda x: torch.zeros(()), lambda given: given), micro_batch=2)[1]
    with pytest.raises(ValueError, match=r"argument of shape \(\) in place, once for each micro-batch"):
        model(x)


class Positions(nn.Module):
    """The first layer computes a bias of attention from its own parameter, and all others take it, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(LENGTH, LENGTH))

    def bias(self, x: Tensor) -> Tensor:
        return self.table.sin()[None]

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bias = self.bias(x) if bias is None else bias
        return x + bias.softmax(-1) @ torch.tanh(self.linear(x)), bias


class OfSamples(Positions):
    def bias(self, x: Tensor) -> Tensor:
        return self.table.sin()[None] * x.mean()


class WithPositions(nn.Module):
    def __init__(self, kind: type[Positions]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        bias = None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return x.square().mean() + bias.square().mean()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_bias_is_taken_once_where_it_is_the_same_for_every_micro_batch(activations):
    (x,) = numbers(1)
    plain, model = pair(lambda: WithPositions(Positions), micro_batch=2, activations=activations, window=1)
    losses = model(x), plain(x)
    assert_close(*losses)
    for loss in losses:
        loss.backward()
    assert_same_models(model, plain)
    model = pair(lambda: WithPositions(OfSamples), micro_batch=2, activations=activations)[1]
    with pytest.raises(ValueError, match=r"shape \(1, 6, 6\) .*not the same for every micro-batch"):
        model(x)


CONFIG: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
GEMMA = {"head_dim": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4}


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_caches_of_transformers_are_filled_in_training(family, samples, activations):
    """As many samples as heads, in a padded batch."""

    def build() -> nn.Module:
        if family == "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**CONFIG, **GEMMA))

    plain, model = pair(build, micro_batch=samples, activations=activations, window=1)
    ids = torch.randint(0, 32, (4, 6))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    outputs = [one.train()(input_ids=ids, attention_mask=mask, labels=ids, use_cache=True) for one in (model, plain)]
    assert_close(*(output.loss for output in outputs))
    for layers in zip(*(output.past_key_values.layers for output in outputs), strict=True):
        assert_close(*([layer.keys, layer.values] for layer in layers))
        lengths = [layer.get_seq_length() for layer in layers]
        assert lengths == [6, 6]
    for output in outputs:
        (output.loss + output.past_key_values.layers[1].values.square().sum()).backward()
    assert_same_models(model, plain)
    stronghold.close(model)


LINEAR = {
    "head_dim": 4,
    **{f"linear_num_{name}_heads": 2 for name in ("key", "value")},
    **{f"linear_{name}_head_dim": 4 for name in ("key", "value")},
    **{"linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "shared_expert_intermediate_size": 8,
}


@pytest.mark.parametrize("batch", [8, 6])
def test_a_cache_of_linear_attention_is_filled_where_samples_are_as_many_as_its_kernel_is_wide(batch):
    """Its convolution writes the size of its kernel into the cache, where none was."""

    def build() -> nn.Module:
        return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**CONFIG, **LINEAR))

    plain, model = pair(build, micro_batch=4, window=1)
    ids = torch.randint(0, 32, (batch, 6))
    outputs = [one.train()(input_ids=ids, labels=ids, use_cache=True) for one in (model, plain)]
    assert_close(*(output.loss for output in outputs))
    ours, theirs = (output.past_key_values.layers[0] for output in outputs)
    assert ours.conv_kernel_size == theirs.conv_kernel_size == {0: 4}
    assert_close([ours.conv_states, ours.recurrent_states], [theirs.conv_states, theirs.recurrent_states])
    for output in outputs:
        output.loss.backward()
    assert_same_models(model, plain)

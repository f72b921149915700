"""How a layer's arguments are cut into micro-batches, and its outputs put together again."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import stronghold
from stronghold.engine.microbatch import batch_of, join, split
from tests.small import SIZE, Cache, Residual, assert_close, numbers

Pair = namedtuple("Pair", ["one", "other"])


def test_the_batch_is_the_first_dimension_of_the_first_floating_tensor():
    x, ids, vector = torch.randn(5, 3, 2), torch.zeros(7, 3, dtype=torch.long), torch.randn(9)
    assert batch_of((ids, vector, x), {}) is x
    assert batch_of((None, 3), {"ids": ids, "x": x}) is x
    assert batch_of((ids,), {"vector": vector}) is None


def test_what_has_the_batch_first_is_cut_and_all_else_goes_to_every_piece():
    x, states = torch.randn(5, 3, 2), torch.randn(5, 4, 2)
    ids, lengths, positions = torch.arange(15).view(5, 3), torch.arange(5), torch.arange(3)
    mask, cos = torch.ones(1, 1, 3, 3, dtype=torch.bool), torch.randn(1, 3, 2)
    pieces = split((x, [ids, (positions, "text")]), {"lengths": lengths, "mask": mask, "pair": Pair(states, cos)}, 2)
    assert len(pieces) == 3
    for number, (args, kwargs) in enumerate(pieces):
        part = slice(2 * number, 2 * number + 2)
        assert torch.equal(args[0], x[part])
        assert torch.equal(args[1][0], ids[part])
        assert args[1][1][0] is positions
        assert args[1][1][1] == "text"
        assert torch.equal(kwargs["lengths"], lengths[part])
        assert kwargs["mask"] is mask
        assert isinstance(kwargs["pair"], Pair)
        assert torch.equal(kwargs["pair"].one, states[part])
        assert kwargs["pair"].other is cos


def test_gradients_of_the_parts_come_together_once():
    """One by one, each would be added to zeros as long as the batch, in which a zero loses its sign."""
    x = torch.randn(5, 3, 2, requires_grad=True)
    whole = x * torch.tensor([1.0, -1.0])
    pieces = split((whole, whole), {"again": [whole]}, 2)
    assert all(args[0] is args[1] is kwargs["again"][0] for args, kwargs in pieces)
    assert len({args[0].grad_fn for args, _ in pieces}) == 1
    gradient = torch.randn(5, 3, 2)
    gradient[0] = 0.0
    torch.cat([args[0] for args, _ in pieces]).backward(gradient)
    expected = gradient * torch.tensor([1.0, -1.0])
    assert torch.equal(x.grad, expected)
    assert torch.equal(x.grad.signbit(), expected.signbit())


def test_what_a_layer_writes_into_a_part_is_refused_and_not_lost():
    x = torch.randn(4, 3, requires_grad=True) * 1
    ((piece,), _), _ = split((x,), {}, 2)
    with pytest.raises(RuntimeError, match="is being modified inplace"):
        piece.relu_()


def test_caches_are_cut_too_and_the_original_is_left_alone():
    x, cache = torch.randn(4, 3, 2), Cache()
    cache.update(0, torch.arange(8.0).view(4, 2, 1))
    pieces = split((x,), {"cache": cache}, 3)
    assert [kwargs["cache"].keys[0][0].shape[0] for _, kwargs in pieces] == [3, 1]
    pieces[0][1]["cache"].update(0, torch.zeros(3, 1, 1))
    assert len(cache.keys[0]) == 1


@pytest.mark.parametrize("size", [4, 5])
def test_a_batch_that_fits_is_left_alone(size):
    x, cache = torch.randn(4, 3), Cache()
    ((args, kwargs),) = split((x,), {"cache": cache}, size)
    assert args[0] is x
    assert kwargs["cache"] is cache


def test_positions_are_not_taken_for_the_batch_where_both_are_as_long():
    x, positions = torch.randn(4, 4, 2), torch.arange(4)
    pieces = split((x, positions), {"states": torch.randn(4, 4, 2)}, 2)
    assert all(args[1] is positions for args, _ in pieces)
    assert [kwargs["states"].shape[0] for _, kwargs in pieces] == [2, 2]


@pytest.mark.parametrize("shape", [(4, 4), (4, 2), (4,)])
def test_what_may_be_the_batch_or_the_sequence_is_refused(shape):
    with pytest.raises(ValueError, match="which arguments have the batch as first dimension"):
        split((torch.randn(4, 4, 2), torch.randn(*shape)), {}, 2)


@dataclass
class Output:
    hidden: Tensor
    weight: Tensor | None = None


def test_outputs_are_put_together_in_their_containers():
    whole, flat, bias = torch.randn(5, 3, 2), torch.randn(15, 4), torch.randn(1, 2, 3, 3)
    leaders = [(2, 3, 2), (2, 3, 2), (1, 3, 2)]

    def outputs(make):
        return [make(whole[i : i + 2], flat[3 * i : 3 * i + 6]) for i in (0, 2, 4)]

    got = join(outputs(lambda x, f: (x, {"flat": f, "none": None}, [bias, 3], Pair(x, "text"))), leaders)
    assert isinstance(got[3], Pair)
    assert_close([got[0], got[1]["flat"], got[2][0], got[3].one], [whole, flat, bias, whole])
    assert (got[1]["none"], got[2][1], got[3].other) == (None, 3, "text")
    assert_close(join(outputs(lambda x, f: Output(x)), leaders).hidden, whole)
    ordered = join(outputs(lambda x, f: OrderedDict(x=x)), leaders)
    assert isinstance(ordered, OrderedDict)
    assert_close(ordered["x"], whole)
    assert_close(join([whole[:2, 0, 0], whole[2:, 0, 0]], [(2, 3), (3, 3)]), whole[:, 0, 0])


@pytest.mark.parametrize(
    "output", [torch.tensor(1.0), torch.randn(4), torch.randn(4, 7), torch.randn(0, 2), torch.randn(3, 2)]
)
def test_outputs_without_a_batch_are_refused(output):
    """Loads of experts, averaged losses: only the layer itself could say what they are together."""
    with pytest.raises(ValueError, match="first dimension is not the batch"):
        join([output, output], [(2, 3, 2), (2, 3, 2)])


def test_numbers_that_differ_are_refused():
    assert join([3, 3], [(2, 3), (2, 3)]) == 3
    with pytest.raises(ValueError, match=r"\[3, 4\]"):
        join([3, 4], [(2, 3), (2, 3)])


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=batch_first) for _ in range(2)
        )


def test_layers_whose_samples_hang_together_are_refused():
    with pytest.raises(ValueError, match=r"batch_first=False in layers\.0"):
        stronghold.offload(Encoder(False), device="cpu", micro_batch=1)
    stronghold.offload(Encoder(True), device="cpu", micro_batch=1)
    model = Residual(block=lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match=r"BatchNorm1d in layers\.0\.1"):
        stronghold.offload(model, device="cpu", layers="layers", micro_batch=1)
    assert stronghold.offload(model, device="cpu", layers="layers")(numbers(1)[0]).isfinite()

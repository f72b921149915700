"""How a layer's arguments are cut into micro-batches."""

import sys
from argparse import Namespace
from collections import namedtuple

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import stronghold
from stronghold.engine.microbatch import batch_of, heads_of, kernels_of, split
from tests.small import LENGTH, SIZE, Cache, Residual, assert_close, numbers, pair

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


@pytest.mark.parametrize("shape", [(4, 2), (4, 5)])
def test_a_table_with_as_many_rows_as_samples_is_refused(shape):
    """Deformable DETR's layers get the sizes of four levels: cut, they broadcast, and losses were others."""
    x, states = torch.randn(4, 9, 2), torch.randn(4, 6, 2)
    with pytest.raises(ValueError, match=r"\(4, [25]\) beside an input of shape \(4, 9, 2\): .* a table"):
        split((x, torch.zeros(shape, dtype=torch.long)), {"states": states}, 2)
    for columns in (1, 6, 7, 9, 12):  # labels, numbers of tokens, with what a cache has before them
        ids = torch.zeros(4, columns, dtype=torch.long)
        assert [args[1].shape[0] for args, _ in split((x, ids), {"states": states}, 2)] == [2, 2]
    for one in (torch.zeros(shape, dtype=torch.bool), torch.zeros(*shape, 1, 1, dtype=torch.long)):
        assert [args[1].shape[0] for args, _ in split((x, one), {"states": states}, 2)] == [2, 2]
    assert all(args[1] is table for table in [torch.zeros(3, 2).long()] for args, _ in split((x, table), {}, 2))


def test_deformable_detr_s_batch_of_as_many_samples_as_levels_is_refused():
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False,
        backbone_config=transformers.ResNetConfig(
            embedding_size=8,
            hidden_sizes=[8, 8, 8, 8],
            depths=[1, 1, 1, 1],
            out_features=["stage2", "stage3", "stage4"],
        ),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=5,
        num_labels=3,
    )
    _, model = pair(lambda: transformers.DeformableDetrModel(config), micro_batch=1, layers="encoder.layers")
    pixels = torch.randn(4, 3, 128, 128)
    with pytest.raises(ValueError, match="a table, such as the sizes of levels"):
        model(pixels)
    assert model(pixels[:2]).last_hidden_state.shape[0] == 2


def test_what_has_the_sequence_first_is_refused_and_positions_for_all_samples_are_not():
    x = torch.randn(6, 4, 2)
    with pytest.raises(ValueError, match=r"\(12, 4, 2\) beside an input of shape \(6, 4, 2\): .* the sequence"):
        split((x, torch.randn(12, 4, 2)), {}, 2)
    ids, positions = torch.zeros(12, 4, 2, dtype=torch.long), torch.randn(1, 4, 2)
    assert all(args[1] is ids and args[2] is positions for args, _ in split((x, ids, positions), {}, 2))


def test_xlnet_whose_layers_have_the_sequence_first_is_refused_and_trains_whole():
    config = transformers.XLNetConfig(vocab_size=48, d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0)
    ids = torch.randint(5, 48, (4, 10), generator=torch.Generator().manual_seed(0))
    plain, whole = pair(lambda: transformers.XLNetLMHeadModel(config).train())
    for micro_batch in (1, 2):
        _, model = pair(lambda: transformers.XLNetLMHeadModel(config).train(), micro_batch=micro_batch)
        with pytest.raises(ValueError, match=r"\(20, 4, 16\) beside an input of shape \(10, 4, 16\): .* the sequence"):
            model(input_ids=ids, labels=ids)
    losses = [model(input_ids=ids, labels=ids).loss for model in (plain, whole)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    assert_close([p.grad for p in whole.parameters()], [p.grad for p in plain.parameters()])


class Biased(nn.Module):
    """Attention with a bias of its scores for each head, as ALiBi has it: one for all samples."""

    def __init__(self, heads: int | None) -> None:
        super().__init__()
        self.projection = nn.Linear(SIZE, 3 * SIZE)
        if heads:
            self.num_heads = heads

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        query, key, value = self.projection(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return x + ((query @ key.mT + bias).softmax(-1) @ value).transpose(1, 2).reshape(x.shape)


class Alibi(nn.Module):
    def __init__(self, heads: int | None, bias: Tensor) -> None:
        super().__init__()
        self.layers, self.bias = nn.ModuleList(Biased(heads) for _ in range(2)), bias

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.bias)
        return x.square().mean()


HEADS = 4
ROW = torch.arange(1.0 - LENGTH, 1.0).expand(HEADS, 1, LENGTH) * torch.tensor([0.5, 0.1, 2.0, 1.0]).view(HEADS, 1, 1)


@pytest.mark.parametrize("bias", [ROW, ROW.expand(HEADS, LENGTH, LENGTH)], ids=["row", "square"])
@pytest.mark.parametrize("heads", [HEADS, None])
def test_a_bias_for_each_head_is_not_taken_for_one_for_each_sample(heads, bias):
    (x,) = numbers(1)
    assert len(x) == HEADS
    plain, model = pair(lambda: Alibi(heads, bias), micro_batch=1)
    with pytest.raises(ValueError, match=r"\(4, [16], 6\) beside an input of shape \(4, 6, 16\): .* that of heads"):
        model(x)
    plain.bias = model.bias = bias[None]
    assert_close([model(x), model(x[:3])], [plain(x), plain(x[:3])])
    plain.bias = model.bias = bias
    assert_close(model(x[:3]), plain(x[:3]))


def test_what_has_as_many_samples_as_heads_is_cut_where_it_has_another_shape_than_a_bias():
    (x,), layer = numbers(1), Biased(HEADS)
    masks = [torch.ones(4, 1, 1, LENGTH), torch.ones(4, LENGTH, dtype=torch.bool), torch.ones(4, 3, SIZE)]
    others = [torch.randn(4, LENGTH, 8), torch.randn(4, 1, SIZE), torch.randn(4, 7, 24), torch.randn(4, SIZE)]
    for _, kwargs in split((x,), {"given": [x, *masks, *others]}, 1, layer):
        assert [len(tensor) for tensor in kwargs["given"]] == [1] * 8
    for shape in [(4,), (4, LENGTH), (4, 1, 1), (4, 1, 9), (4, 9, 9), (4, LENGTH, LENGTH)]:
        with pytest.raises(ValueError, match="that of heads"):
            split((x, torch.randn(shape)), {}, 1, layer)
        assert [len(args[1]) for args, _ in split((x, torch.randn(shape)), {}, 1, Biased(8))] == [1] * 4
    assert heads_of(nn.TransformerEncoderLayer(SIZE, 2)) == {2}


def test_sizes_of_convolutions_are_those_of_the_modules_and_their_configs():
    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0].conv_kernel_size, layer[0].config = 4, Namespace(mamba_d_conv=3, hidden_size=5, conv="none")
    assert (kernels_of(layer), kernels_of(None), heads_of(layer)) == ({3, 4}, set(), set())


class Flexible(nn.Module):
    """Attention by PyTorch's flex_attention, with the mask among others by name, as Gemma 3's decoder has them."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor, masks: dict[str, tuple[BlockMask]]) -> Tensor:
        given = self.projection(x).detach()  # on CPUs it has no backward pass
        query, key, value = given.view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = flex_attention(query, key, value, block_mask=masks["full"][0])
        return x + self.out(attended.transpose(1, 2).reshape(x.shape))


class WithFlex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.mask = nn.ModuleList(Flexible() for _ in range(2)), None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, {"full": (self.mask,)})
        return x.square().mean()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_mask_of_flex_attention_for_each_sample_is_refused(activations):
    """Its function takes the sample's number in the whole batch, and each micro-batch counts from 0 again."""
    (x,), lengths = numbers(1), torch.tensor([6, 2, 3, 4])
    plain, model = pair(WithFlex, micro_batch=2, activations=activations)
    plain.mask = model.mask = create_block_mask(
        lambda sample, head, query, key: key < lengths[sample], 4, None, LENGTH, LENGTH, device="cpu"
    )
    with pytest.raises(ValueError, match=r"BlockMask of flex attention for 4 samples.*another attn_impl.*offload w"):
        model(x)
    assert_close(model(x[:2]), plain(x[:2]))
    plain.mask = model.mask = create_block_mask(
        lambda sample, head, query, key: query >= key, None, None, LENGTH, LENGTH, device="cpu"
    )
    assert_close(model(x), plain(x))


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(SIZE, 2, SIZE, batch_first=batch_first) for _ in range(2)
        )


def test_layers_whose_samples_hang_together_are_refused():
    with pytest.raises(ValueError, match=r"batch_first=False in layers\.0\.self_attn"):
        stronghold.offload(Encoder(False), device="cpu", micro_batch=1)
    for inner in (nn.MultiheadAttention(SIZE, 2), nn.GRU(SIZE, SIZE)):  # of a block of the user's own
        model = Residual(block=lambda inner=inner: nn.ModuleDict({"norm": nn.LayerNorm(SIZE), "inner": inner}))
        with pytest.raises(ValueError, match=rf"batch_first=False in layers\.0\.inner, {type(inner).__name__}"):
            stronghold.offload(model, device="cpu", layers="layers", micro_batch=1)
    stronghold.offload(Encoder(True), device="cpu", micro_batch=1)
    model = Residual(block=lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(6)))
    with pytest.raises(ValueError, match=r"BatchNorm1d in layers\.0\.1"):
        stronghold.offload(model, device="cpu", layers="layers", micro_batch=1)
    assert stronghold.offload(model, device="cpu", layers="layers")(numbers(1)[0]).isfinite()


FAMILY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def attentive() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**FAMILY, attn_implementation="eager"))


def routed() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**FAMILY, **experts, router_aux_loss_coef=1.0))


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize(("build", "name"), [(attentive, "attentions"), (routed, "router_logits")])
def test_what_transformers_records_inside_of_layers_is_put_together(build, name, micro_batch, activations):
    """An auxiliary loss takes the routers' logits with the mask of the whole batch, distillation the attentions."""
    plain, ours = pair(build, micro_batch=micro_batch, activations=activations, window=1)
    ids = torch.randint(0, 64, (3, 10), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    found = []
    for model in (plain, ours):
        output = model(input_ids=ids, attention_mask=mask, labels=ids, output_attentions=name == "attentions")
        recorded = getattr(output, name)
        (output.loss + sum(one.square().mean() for one in recorded)).backward()
        found.append([output.loss.detach(), *recorded, *(p.grad for p in model.parameters())])
    assert_close(found[1], found[0])
    with torch.no_grad():
        output = ours(input_ids=ids, output_attentions=name == "attentions")
    assert len(getattr(output, name)) == 3


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes before")
def test_an_error_in_a_micro_batch_says_that_it_is_one():
    """BLOOM's bias for each sample and head has both in its first dimension, and goes whole to every micro-batch."""
    shape = {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    _, model = pair(lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**shape)), micro_batch=1)
    with pytest.raises(RuntimeError) as caught:
        model(input_ids=torch.ones((3, 10), dtype=torch.int64), use_cache=False)
    (note,) = caught.value.__notes__
    assert note.startswith("transformer.h.0 ran for one of 3 micro-batches") and "without micro_batch" in note

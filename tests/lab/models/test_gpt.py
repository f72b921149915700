"""The reference GPT: its size, its arithmetic and its initialisation."""

import math

import pytest
import torch
import torch.nn.functional as F

from stronghold.lab.models.gpt import GPT, GPTConfig, rotary

SMALL = GPTConfig(layers=3, hidden=32, heads=4, sequence=16, vocabulary=300)


def build(config=SMALL, seed=0):
    torch.manual_seed(seed)
    return GPT(config)


@pytest.mark.parametrize(("layers", "billions"), [(32, "1.717"), (48, "2.522"), (78, "4.033"), (100, "5.141")])
def test_parameter_counts_are_the_published_ones(layers, billions):
    config = GPTConfig(layers=layers, hidden=2048)
    with torch.device("meta"):
        model = GPT(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count / 1e9:.3f}" == billions
    assert count == config.parameters == 12 * layers * 2048**2 + 13 * layers * 2048 + 51328 * 2048 + 2 * 2048
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


@pytest.mark.parametrize(("vocabulary", "rows"), [(51200, 51328), (127, 128), (128, 256), (50257, 50304)])
def test_the_table_has_a_row_for_the_separator_and_whole_blocks_of_128(vocabulary, rows):
    config = GPTConfig(layers=1, hidden=32, vocabulary=vocabulary)
    assert (config.separator, config.rows) == (vocabulary, rows)


def test_loss_is_cross_entropy_of_the_logits_shifted_by_one():
    model = build().double()
    ids = torch.randint(0, 300, (2, 16))
    labels = ids.clone()
    labels[0, 5:9] = -100
    output = model(ids, labels=labels)
    assert output.logits is None
    logits = model(ids).logits
    assert logits.shape == (2, 16, 384)
    expected = F.cross_entropy(logits[:, :-1].reshape(-1, 384), labels[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, expected, rtol=1e-12, atol=0)
    assert model(ids).loss is None


def test_gradients_are_those_of_the_plain_loss():
    ids = torch.randint(0, 300, (2, 16))
    ours, plain = build().double(), build().double()
    ours(ids, labels=ids).loss.backward()
    logits = plain(ids).logits
    F.cross_entropy(logits[:, :-1].reshape(-1, 384), ids[:, 1:].reshape(-1)).backward()
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=1e-14, msg=name)


def test_the_whole_forward_pass_is_the_textbooks():
    """Written out without fused attention, module calls or complex tricks, for one sample."""
    model = build().double()
    ids = torch.randint(0, 300, (1, 16))
    x = model.embedding.weight[ids[0]]
    mask = torch.full((16, 16), -math.inf, dtype=torch.float64).triu(1)
    for layer in model.layers:
        y = F.layer_norm(x, (32,), layer.attention_norm.weight, layer.attention_norm.bias)
        q, k, v = (y @ layer.qkv.weight.T + layer.qkv.bias).split(32, dim=1)
        heads = []
        for h in range(4):
            part = slice(8 * h, 8 * h + 8)
            turned = [
                torch.cat((z[:4] * c - z[4:] * s, z[4:] * c + z[:4] * s))
                for matrix in (q[:, part], k[:, part])
                for z, c, s in zip(matrix, *angles(16, 8), strict=True)
            ]
            qh, kh = torch.stack(turned[:16]), torch.stack(turned[16:])
            heads.append(((qh @ kh.T) / math.sqrt(8) + mask).softmax(1) @ v[:, part])
        x = x + torch.cat(heads, 1) @ layer.out.weight.T + layer.out.bias
        y = F.layer_norm(x, (32,), layer.mlp_norm.weight, layer.mlp_norm.bias)
        x = x + F.gelu(y @ layer.up.weight.T + layer.up.bias) @ layer.down.weight.T + layer.down.bias
    x = F.layer_norm(x, (32,), model.norm.weight, model.norm.bias)
    expected = x @ model.embedding.weight.T
    torch.testing.assert_close(model(ids).logits[0], expected, rtol=1e-5, atol=1e-6)


def angles(sequence, head_size):
    frequencies = [10000 ** (-2 * i / head_size) for i in range(head_size // 2)]
    table = torch.tensor([[t * f for f in frequencies] for t in range(sequence)], dtype=torch.float64)
    return table.cos(), table.sin()


def test_rotary_angles_by_position_and_frequency():
    cos, sin = rotary(16, 8, torch.device("cpu"))
    want_cos, want_sin = angles(16, 8)
    assert cos.shape == (1, 1, 16, 4)
    torch.testing.assert_close(cos[0, 0].double(), want_cos, rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[0, 0].double(), want_sin, rtol=0, atol=1e-5)


def test_no_position_sees_a_later_token():
    model = build()
    ids = torch.randint(0, 300, (1, 16))
    changed = ids.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 300
    before, after = model(ids).logits[0], model(changed).logits[0]
    assert torch.equal(before[:9], after[:9])
    assert not torch.allclose(before[9:], after[9:])


def test_initialisation_is_gpt2s_and_follows_the_seed():
    config = GPTConfig(layers=8, hidden=128, heads=4, vocabulary=1000)
    model = build(config)
    residual = 0.02 / math.sqrt(16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        else:
            std = residual if name.endswith(("out.weight", "down.weight")) else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.03), name
    again, other = build(config), build(config, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert not torch.equal(model.layers[0].qkv.weight, other.layers[0].qkv.weight)


def test_a_model_built_on_meta_is_the_same_after_initialize():
    with torch.device("meta"):
        late = GPT(SMALL)
    late.to_empty(device="cpu")
    torch.manual_seed(0)
    late.initialize()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), build().parameters(), strict=True))


def test_dropout_draws_in_training_only():
    model = build(GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=300, dropout=0.5))
    ids = torch.randint(0, 300, (1, 16))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_bf16_follows_fp32():
    model = build()
    ids = torch.randint(0, 300, (2, 16))
    exact = model(ids, labels=ids).loss.item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(ids, labels=ids).loss.item() == pytest.approx(exact, rel=5e-3)
    assert model.bfloat16()(ids, labels=ids).loss.item() == pytest.approx(exact, rel=5e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": 0, "hidden": 32}, "layers must be a whole number of at least 1 \\(got 0\\)"),
        ({"layers": 1, "hidden": 40}, "got hidden=40, heads=16\\); pass hidden=64"),
        ({"layers": 1, "hidden": 32, "dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**settings)


def test_an_input_longer_than_the_sequence_is_refused():
    with pytest.raises(ValueError, match="got 17 tokens, sequence=16"):
        build()(torch.zeros(1, 17, dtype=torch.long))

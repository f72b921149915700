"""Values given layer by layer: in the order of an ordinary construction, and the rest of the model untouched."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.unit import unit_of
from stronghold.weights import fill
from tests.reference import CASES, decay_groups, train
from tests.small import SIZE, Residual, numbers

CONFIG = GPTConfig(layers=3, hidden=32, heads=2, sequence=16, vocabulary=300)


def on_meta(build):
    with torch.device("meta"):
        return build()


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_an_initialised_model_is_the_one_that_was_built_whole(tmp_path, store, dtype):
    case = CASES["gpt"]
    torch.manual_seed(0)
    model = on_meta(case.build)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    where = "ram" if store == "ram" else str(tmp_path / "store")
    torch.manual_seed(0)
    stronghold.offload(model, device="cpu", window=2, dtype=dtype, store=where, weights=model.initialize_module)
    expected = stronghold.offload(case.model(), device="cpu", window=2, dtype=dtype)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert same(model, expected)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        masters = [unit_of(p).master(p.__dict__["_index"]) for p in (one, other)]
        assert torch.equal(*masters)
    losses = [train(m, stronghold.AdamW(decay_groups(m), lr=1e-2), case.batches(3)) for m in (model.train(), expected)]
    assert losses[0] == losses[1]


def test_no_more_than_a_layer_is_in_memory_while_it_is_initialised():
    model = on_meta(Residual)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    seen = []

    def initialise(module):
        seen.append([names[id(p)] for p in model.parameters() if not p.is_meta])
        reset(module)

    stronghold.offload(model, device="cpu", weights=initialise)
    parts = [["into"], *[[f"layers.{i}.{part}" for part in ("norm", "up", "down")] for i in range(4)], ["out"]]
    expected = [[f"{one}.{kind}" for one in part for kind in ("weight", "bias")] for part in parts]
    assert [one for number, one in enumerate(seen) if one not in seen[:number]] == expected


def test_parts_that_have_values_keep_them():
    model = on_meta(Residual)
    model.out = nn.Linear(16, 3)
    kept = model.out.weight.detach().clone()
    calls = []
    stronghold.offload(model, device="cpu", weights=lambda module: (calls.append(module), reset(module)))
    assert torch.equal(model.out.weight, kept)
    assert model.out not in calls
    assert model.into in calls


def test_a_tied_parameter_is_initialised_once_and_stays_tied():
    model = on_meta(CASES["gpt2"].build)
    model.tie_weights()
    for name, buffer in CASES["gpt2"].build().named_buffers():
        owner, _, last = name.rpartition(".")
        model.get_submodule(owner)._buffers[last] = buffer
    stronghold.offload(model, device="cpu", weights=model._init_weights)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert 0.01 < model.lm_head.weight.std().item() < 0.03
    assert model.transformer.h[1].mlp.c_proj.weight.std().item() < 0.012  # scaled down by its parent's rule


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"meta device are into\.weight, .* and \d+ more\); pass weights="),
        (7, "weights must be a checkpoint's folder, or a function"),
        (lambda module: None, r"left into\.(weight|bias) without, or with NaN"),
        (
            lambda module: (
                setattr(module, "weight", nn.Parameter(torch.ones(2))) if hasattr(module, "weight") else None
            ),
            "replaced one of Linear",
        ),
    ],
)
def test_weights_that_are_none_are_refused_and_the_model_stays_as_it_is(weights, message):
    model = on_meta(Residual)
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        stronghold.offload(model, device="cpu", weights=weights)
    assert all(parameter.is_meta for parameter in model.layers.parameters())
    if not (callable(weights) and "replaced" in message):
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
        stronghold.offload(model, device="cpu", weights=reset)


def test_a_model_whose_ties_the_meta_device_has_cost_is_told_how_to_tie_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    accelerate = pytest.importorskip("accelerate")
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = transformers.BartConfig(vocab_size=99, max_position_embeddings=64, **sizes, **heads)
    saved = transformers.BartForConditionalGeneration(config)
    saved.save_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.BartForConditionalGeneration(config)
    with pytest.raises(ValueError, match=r"lm_head.weight\); call model.tie_weights\(\) once the model is"):
        stronghold.offload(model, device="cpu", weights=tmp_path)
    model.tie_weights()
    stronghold.offload(model, device="cpu", weights=tmp_path)
    assert model.lm_head.weight is model.model.shared.weight
    for name, value in saved.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_an_error_in_the_initialiser_leaves_the_model_as_it_was():
    model = on_meta(Residual)

    def fail(module):
        reset(module)
        if module is model.layers[1].down:
            raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        stronghold.offload(model, device="cpu", weights=fail)
    assert all(parameter.is_meta for parameter in model.parameters())
    stronghold.offload(model, device="cpu", weights=reset)


def test_buffers_without_values_are_refused():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    with pytest.raises(ValueError, match=r"meta device are layers\.0\.1\.running_mean.*include_buffers=False"):
        stronghold.offload(on_meta(Normed), device="cpu", weights=reset)


def test_frozen_parameters_stay_frozen():
    model = on_meta(Residual)
    model.layers[1].requires_grad_(False)
    stronghold.offload(model, device="cpu", dtype=torch.bfloat16, weights=reset)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert [name.split(".")[:2] for name in frozen] == [["layers", "1"]] * 6


def test_filling_a_model_gives_what_offloading_it_gives():
    torch.manual_seed(4)
    whole = on_meta(lambda: GPT(CONFIG))
    fill(whole, whole.initialize_module)
    torch.manual_seed(4)
    model = on_meta(lambda: GPT(CONFIG))
    stronghold.offload(model, device="cpu", weights=model.initialize_module)
    assert same(model, whole)


class Recurrent(nn.Module):
    """A layer around ``kind``, a module of torch's that refers weakly to its weights."""

    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(SIZE, SIZE, batch_first=True)

    def forward(self, x):
        return x + self.rnn(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("source", ["initialiser", "files"])
def test_recurrent_modules_get_their_values_and_train_as_in_plain_pytorch(tmp_path, kind, source):
    def build():
        return Residual(block=lambda: Recurrent(kind))

    torch.manual_seed(4)
    plain = build()
    torch.manual_seed(4)
    model = on_meta(build)
    weights = reset
    if source == "files":
        weights = tmp_path
        save_file(plain.state_dict(), tmp_path / "model.safetensors")
    stronghold.offload(model, device="cpu", window=2, weights=weights)
    assert same(model, plain)
    losses = []
    for one in (plain, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False)
        losses.append([])
        for x in numbers(3):
            loss = one(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert same(model, plain)


def test_a_write_into_one_parameter_leaves_the_masters_of_the_others():
    model = on_meta(lambda: GPT(CONFIG))
    assert model.layers[1].up.weight._version != 0, "initialising on the meta device counts as a write"
    stronghold.offload(model, device="cpu", dtype=torch.bfloat16, weights=model.initialize_module)
    parameter = model.layers[1].up.weight
    unit, index = unit_of(parameter), parameter.__dict__["_index"]
    before = unit.master(index)
    assert not torch.equal(before, parameter.float())
    with torch.no_grad():
        model.layers[1].down.weight.zero_()
    model(torch.arange(8)[None])
    assert torch.equal(unit.master(index), before)

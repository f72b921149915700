"""Models from files: bit for bit, and built without values."""

import json

import pytest
import torch
import transformers

from stronghold.checkpoint.pretrained import save
from stronghold.lab.models.files import (
    build_model,
    initialiser_of,
    inputs_of,
    load_model,
    longest_sequence_of,
    vocabulary_of,
)
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.weights import fill

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=300, dropout=0.25)


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=24, vocab_size=300))


def test_a_gpt_comes_back_bit_for_bit(tmp_path):
    model = GPT(CONFIG)
    save(model, tmp_path / "saved")
    again, with_weights = load_model(tmp_path / "saved")
    assert with_weights
    assert again.config == CONFIG
    assert same(again, model)


def test_a_config_alone_is_a_new_model(tmp_path):
    save(GPT(CONFIG), tmp_path / "saved")
    torch.manual_seed(4)
    again, with_weights = load_model(tmp_path / "saved" / "config.json")
    assert not with_weights
    torch.manual_seed(4)
    assert same(again, GPT(CONFIG))


def test_a_transformers_model_comes_back_bit_for_bit_in_fp32_and_training(tmp_path):
    model = gpt2()
    save(model.bfloat16(), tmp_path / "saved")
    again, with_weights = load_model(tmp_path / "saved")
    assert with_weights
    assert again.training
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert same(again, model.float())
    assert again.config.use_cache


def test_a_transformers_config_alone_is_a_new_model(tmp_path):
    gpt2().config.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "config.json"):
        model, with_weights = load_model(path)
        assert not with_weights
        assert type(model).__name__ == "GPT2LMHeadModel"


def test_what_a_model_takes():
    gpt, other = GPT(CONFIG), gpt2()
    assert (vocabulary_of(gpt), vocabulary_of(other)) == (301, 300)
    assert (longest_sequence_of(gpt), longest_sequence_of(other)) == (16, 24)
    batch = torch.randint(0, 300, (2, 16))
    assert inputs_of(gpt, batch) == {"input_ids": batch, "labels": batch}
    output = other(**inputs_of(other, batch))
    assert output.loss.isfinite()
    assert output.past_key_values is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("{}", "no 'model_type'"),
        ('{"model_type": "nothing-known"}', "nothing-known"),
        ('{"model_type": "stronghold-gpt", "layers": 0, "hidden": 32}', "layers must be"),
        ('{"model_type": "vit"}', "ViTConfig"),
    ],
)
def test_a_config_that_is_no_language_models_is_refused_in_one_line(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as refusal:
        load_model(tmp_path)
    assert "\n" not in str(refusal.value)
    assert str(tmp_path) in str(refusal.value)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a folder with a config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "llama"])
def test_a_model_is_built_without_values_but_with_buffers_and_ties(tmp_path, kind):
    from tests.reference import CASES

    whole = CASES[kind].model()
    save(whole, tmp_path / "saved")
    model, weights, with_weights = build_model(tmp_path / "saved")
    assert with_weights
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    fill(model, weights)
    assert same(model, whole)
    for (name, buffer), (_, expected) in zip(model.named_buffers(), whole.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_a_model_generates_as_its_files_say_and_is_saved_so(tmp_path):
    save(gpt2(), tmp_path / "from")
    said = {
        "transformers_version": transformers.__version__,
        "do_sample": True,
        "temperature": 0.6,
        "eos_token_id": [0, 5],
    }
    (tmp_path / "from" / "generation_config.json").write_text(json.dumps(said))
    model, weights, _ = build_model(tmp_path / "from")
    fill(model, weights)
    save(model, tmp_path / "to")
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == said


def test_weights_in_another_format_are_read_whole(tmp_path):
    model = gpt2()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    again, with_weights = load_model(tmp_path)
    assert with_weights
    assert same(again, model)


def test_an_initialiser_draws_what_the_gpt_itself_draws():
    torch.manual_seed(3)
    whole = GPT(CONFIG)
    with torch.device("meta"):
        model = GPT(CONFIG)
    torch.manual_seed(3)
    fill(model, initialiser_of(model))
    assert same(model, whole)


def test_a_transformers_model_is_initialised_by_the_rules_of_its_parts():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=8, n_embd=64, n_head=2, n_positions=24, vocab_size=300)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    fill(model, initialiser_of(model))
    block = model.transformer.h[3]
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(block.ln_1.weight, torch.ones(64))
    assert model.lm_head.weight is model.transformer.wte.weight

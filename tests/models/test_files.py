"""Models from files and back: bit for bit, and never half a folder."""

import json
import os

import pytest
import torch

from stronghold.models import files
from stronghold.models.files import (
    check_save_folder,
    inputs_of,
    load_model,
    longest_sequence_of,
    save_model,
    vocabulary_of,
)
from stronghold.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=300, dropout=0.25)


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=24, vocab_size=300))


def test_a_gpt_comes_back_bit_for_bit(tmp_path):
    model = GPT(CONFIG)
    save_model(model, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors"]
    again, with_weights = load_model(tmp_path / "saved")
    assert with_weights
    assert again.config == CONFIG
    assert same(again, model)


def test_a_gpt_whose_parameters_share_one_buffer_is_saved_like_any_other(tmp_path):
    model = GPT(CONFIG)
    for layer in model.layers:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in layer.parameters()])
        offset = 0
        for parameter in layer.parameters():
            parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
    save_model(model, tmp_path / "saved")
    assert same(load_model(tmp_path / "saved")[0], model)


def test_a_config_alone_is_a_new_model(tmp_path):
    save_model(GPT(CONFIG), tmp_path / "saved")
    torch.manual_seed(4)
    again, with_weights = load_model(tmp_path / "saved" / "config.json")
    assert not with_weights
    torch.manual_seed(4)
    assert same(again, GPT(CONFIG))


def test_a_transformers_model_comes_back_bit_for_bit_in_fp32_and_training(tmp_path):
    model = gpt2()
    save_model(model.bfloat16(), tmp_path / "saved")
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


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    first, second = GPT(CONFIG), GPT(CONFIG)
    save_model(first, tmp_path / "saved")
    (tmp_path / "saved" / "stale.bin").touch()
    save_model(second, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors"]
    assert same(load_model(tmp_path / "saved")[0], second)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "draft.txt").write_text("dear")
    for target in ("letters", "letters/draft.txt"):
        with pytest.raises(ValueError, match="must be new, empty or hold a model"):
            save_model(first, tmp_path / target)
    assert (tmp_path / "letters" / "draft.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    check_save_folder(tmp_path / "empty")


def test_a_failed_save_names_the_folder_and_leaves_the_old_model(tmp_path, monkeypatch):
    model = GPT(CONFIG)
    save_model(model, tmp_path / "saved")

    def fill(model, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write", fill)
    with pytest.raises(OSError, match=r"cannot save the model \(No space left on device\).*saved"):
        save_model(GPT(CONFIG), tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert same(load_model(tmp_path / "saved")[0], model)


def test_the_saved_config_is_readable_json(tmp_path):
    save_model(GPT(CONFIG), tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "stronghold-gpt"
    assert (config["layers"], config["dropout"]) == (2, 0.25)

"""Checkpoints streamed in and out: the numbers of transformers' own loading and saving, and never half a folder."""

import errno
import json
import os
import resource
import shutil
import signal
import socket
import stat as stat_module
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import stronghold
from stronghold.checkpoint.pretrained import check_save_folder
from stronghold.errors import StoreError
from stronghold.formats.weight_files import WeightFiles
from stronghold.lab.models.files import load_model
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.unit import unit_of
from tests.reference import CASES, decay_groups, train
from tests.small import ADAMW, Residual, assert_same_models, numbers, ordinary_loop

CONFIG = GPTConfig(layers=2, hidden=32, heads=2, sequence=16, vocabulary=300, dropout=0.25)


@pytest.fixture(params=["ram", "disk"])
def store(request, tmp_path):
    return "ram" if request.param == "ram" else str(tmp_path / "store")


def tensors_of(folder):
    """Returns what is in a checkpoint's files, by name, and asserts that no name is there twice."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        assert not found.keys() & tensors.keys()
        found.update(tensors)
    return found


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype is other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def optimizer_of(model):
    return stronghold.AdamW(decay_groups(model), lr=1e-2)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_loaded_model_computes_and_learns_as_one_from_pretrained(tmp_path, store, kind, shard, dtype):
    case = CASES[kind]
    whole = case.model(3)
    whole.save_pretrained(tmp_path / "hub", max_shard_size=shard)
    assert (len(list((tmp_path / "hub").glob("*.safetensors"))) > 1) == (shard != "5GB")
    expected = stronghold.offload(type(whole).from_pretrained(tmp_path / "hub"), device="cpu", window=2, dtype=dtype)
    model = stronghold.load(tmp_path / "hub", device="cpu", window=2, dtype=dtype, store=store)
    assert type(model) is type(whole)
    assert not model.training
    (batch,) = case.batches(1, seed=9)
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, expected(**batch).logits)
    steps = case.batches(3)
    losses = [train(one.train(), optimizer_of(one), steps) for one in (model, expected)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3
    assert same(model, expected)


def test_a_loaded_model_is_called_by_its_folder_and_so_is_the_base_of_its_adapters(tmp_path):
    whole = CASES["llama"].model(3)
    whole.save_pretrained(tmp_path / "hub")
    expected = type(whole).from_pretrained(str(tmp_path / "hub"))
    model = stronghold.load(str(tmp_path / "hub"), device="cpu", frozen=True)
    assert model.name_or_path == expected.name_or_path == str(tmp_path / "hub")
    assert model.config.name_or_path == expected.config.name_or_path
    assert model.model.name_or_path == expected.model.name_or_path
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    stronghold.save(adapted, tmp_path / "adapters")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapters"))  # finds the base by that name
    assert again.base_model.model.name_or_path == str(tmp_path / "hub")


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "t5", "bert", "resnet"])
def test_what_transformers_converts_ties_and_buffers_is_as_it_makes_it(tmp_path, kind):
    whole = CASES[kind].model(3)
    whole.save_pretrained(tmp_path / "hub")
    model = stronghold.load(tmp_path / "hub", device="cpu")
    assert same(model, whole)
    stronghold.save(model, tmp_path / "ours", max_shard_size="10KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "hub"))


def test_a_model_trained_from_the_files_of_a_base_model_finds_its_names(tmp_path):
    whole = CASES["gpt2"].model(3)
    bare = {name.removeprefix("transformer."): t.clone() for name, t in whole.transformer.state_dict().items()}
    whole.save_pretrained(tmp_path / "hub")
    save_file(bare, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    assert same(stronghold.load(tmp_path / "hub", device="cpu"), whole)


def test_a_half_precision_checkpoint_is_converted_exactly(tmp_path):
    whole = CASES["llama"].model(3).half()
    whole.save_pretrained(tmp_path / "hub")
    with pytest.raises(ValueError, match=r"must be float32 or bfloat16 \(got torch\.float16"):
        stronghold.load(tmp_path / "hub", device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        model = stronghold.load(tmp_path / "hub", device="cpu", dtype=dtype)
        stronghold.save(model, tmp_path / "ours", dtype=torch.float32)
        assert_same(tensors_of(tmp_path / "ours"), {n: t.float() for n, t in tensors_of(tmp_path / "hub").items()})


def test_a_config_without_dtype_has_the_files_own(tmp_path):
    whole = CASES["llama"].model(3).bfloat16()
    whole.save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    settings = json.loads(path.read_text())
    assert settings.pop("dtype") == "bfloat16"
    path.write_text(json.dumps(settings))
    model = stronghold.load(tmp_path / "hub", device="cpu", model_class=transformers.AutoModelForCausalLM)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert same(model, whole)


def test_the_generation_config_comes_along(tmp_path):
    whole = CASES["llama"].model()
    whole.generation_config.max_new_tokens = 7
    whole.save_pretrained(tmp_path / "hub")
    model = stronghold.load(tmp_path / "hub", device="cpu")
    assert model.generation_config.max_new_tokens == 7
    stronghold.save(model, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert again.generation_config.max_new_tokens == 7


def test_a_generation_config_that_transformers_warns_of_is_saved_with_what_changed_since(tmp_path):
    """Llama 2's had sampling values without do_sample: transformers reads those, and refused them at the save."""
    CASES["llama"].model().save_pretrained(tmp_path / "hub")
    unclean = {"do_sample": False, "temperature": 0.1, "top_p": 0.2}
    (tmp_path / "hub" / "generation_config.json").write_text(json.dumps(unclean))
    model = stronghold.load(tmp_path / "hub", device="cpu")
    model.generation_config.pad_token_id = 1  # as TRL does
    stronghold.save(model, tmp_path / "ours")
    saved = json.loads((tmp_path / "ours" / "generation_config.json").read_text())
    assert saved == unclean | {"pad_token_id": 1, "transformers_version": transformers.__version__}


@pytest.mark.parametrize("resident", [0, 1])
@pytest.mark.parametrize("shard", ["5GB", "10KB"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_transformers_reads_a_trained_model_as_it_reads_its_own_files(tmp_path, store, kind, shard, resident):
    case = CASES[kind]
    model = stronghold.offload(case.model(), device="cpu", window=2, store=store, resident=resident)
    optimizer = optimizer_of(model)
    train(model, optimizer, case.batches(2))
    stronghold.save(model, tmp_path / "ours", max_shard_size=shard)  # the last update is under way
    del optimizer
    model.save_pretrained(tmp_path / "theirs", max_shard_size=shard)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_text() == (tmp_path / "theirs" / name).read_text()
    assert same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours"), model)


@pytest.mark.parametrize("resident", [0, 1])
def test_bf16_is_written_as_computed_with_or_its_masters_to_the_bit(tmp_path, store, resident):
    case = CASES["gpt2"]
    model = stronghold.offload(
        case.model(), device="cpu", window=2, store=store, dtype=torch.bfloat16, resident=resident
    )
    optimizer = optimizer_of(model)
    train(model, optimizer, case.batches(2))
    with torch.no_grad():
        model.transformer.h[2].mlp.c_fc.weight[0, 0] = 0.5  # its own master from here on
        model.transformer.wpe.weight[1, 2] = -3.0
    stronghold.save(model, tmp_path / "bf16")
    stronghold.save(model, tmp_path / "fp32", dtype=torch.float32)
    written = tensors_of(tmp_path / "bf16")
    state = dict(model.state_dict())
    state.pop("lm_head.weight")
    assert_same(written, state)
    masters = tensors_of(tmp_path / "fp32")
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["dtype"] == "float32"
    for name, parameter in model.named_parameters():
        unit = unit_of(parameter)
        assert torch.equal(masters[name], unit.master(parameter.__dict__["_index"]).cpu()), name
        assert torch.equal(masters[name] != written[name].float(), masters[name].bfloat16().float() != masters[name])
    assert masters["transformer.h.2.mlp.c_fc.weight"][0, 0] == 0.5
    assert masters["transformer.wpe.weight"][1, 2] == -3.0
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert again.lm_head.weight is again.transformer.wte.weight


def test_an_ordinary_model_is_saved_the_same_way_and_keeps_its_config(tmp_path):
    model = CASES["qwen3"].model()
    before = model.config.to_dict()
    stronghold.save(model, tmp_path / "ours", dtype=torch.float16)
    model.half().save_pretrained(tmp_path / "theirs")
    assert_same(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "float16"
    stronghold.save(CASES["qwen3"].model(), tmp_path / "again")
    fresh = CASES["qwen3"].model()
    stronghold.save(fresh, tmp_path / "fresh", dtype=torch.bfloat16)
    assert fresh.config.to_dict() == before


def test_the_reference_gpt_is_saved_and_loaded_too(tmp_path, store):
    model = stronghold.offload(GPT(CONFIG), device="cpu", store=store)
    stronghold.save(model, tmp_path / "saved")
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config == {"model_type": "stronghold-gpt", **vars(CONFIG)}
    again = stronghold.load(tmp_path / "saved", device="cpu", model_class=GPT)
    assert again.config == CONFIG
    assert same(again, model)


def test_a_model_without_configuration_is_saved_as_its_weights(tmp_path):
    model = Residual()
    stronghold.save(model, tmp_path / "saved")
    assert os.listdir(tmp_path / "saved") == ["model.safetensors"]
    assert_same(tensors_of(tmp_path / "saved"), dict(model.state_dict()))
    stronghold.save(model, tmp_path / "saved")


def test_parameters_that_lie_in_one_buffer_are_saved_like_any_others(tmp_path):
    model = GPT(CONFIG)
    for layer in model.layers:
        flat = torch.cat([parameter.detach().reshape(-1) for parameter in layer.parameters()])
        offset = 0
        for parameter in layer.parameters():
            parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
    stronghold.save(model, tmp_path / "saved")
    assert same(load_model(tmp_path / "saved")[0], model)


def test_saving_replaces_a_model_and_nothing_else(tmp_path):
    first, second = GPT(CONFIG), GPT(CONFIG)
    stronghold.save(first, tmp_path / "saved", max_shard_size="50KB")
    (tmp_path / "saved" / "pytorch_model.bin").touch()
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    (tmp_path / "saved" / "notes").mkdir()
    (tmp_path / "saved" / "notes" / "a.txt").write_text("mine")
    stronghold.save(second, tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert sorted(os.listdir(tmp_path / "saved")) == ["config.json", "model.safetensors", "notes", "tokenizer.json"]
    assert (tmp_path / "saved" / "notes" / "a.txt").read_text() == "mine"
    assert same(load_model(tmp_path / "saved")[0], second)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "draft.txt").write_text("dear")
    for target in ("letters", "letters/draft.txt"):
        with pytest.raises(ValueError, match="must be new, empty or hold a model"):
            stronghold.save(first, tmp_path / target)
    assert (tmp_path / "letters" / "draft.txt").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    check_save_folder(tmp_path / "empty")


def test_what_is_in_use_in_the_folder_goes_on_there(tmp_path):
    """The store that the model itself is in, and a log that is open."""
    folder, store = tmp_path / "out", tmp_path / "out" / "store"
    stronghold.save(Residual(), folder)
    model = stronghold.offload(Residual(), store=store, window=1, device="cpu")
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    with open(folder / "log.txt", "w") as log:
        print("before", file=log, flush=True)
        stronghold.save(model, folder)
        print("after", file=log, flush=True)
    assert (folder / "log.txt").read_text() == "before\nafter\n"
    with pytest.raises(StoreError, match="in use by another model"):
        stronghold.offload(Residual(), store=store, window=1, device="cpu")
    plain = Residual()
    plain.load_state_dict(model.state_dict())
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for each, steps in ((model, optimizer), (plain, expected)):
        torch.manual_seed(1)
        ordinary_loop(each, steps, numbers(2))
    stronghold.checkpoint.save(store, model, optimizer)
    stronghold.close(model)
    again = stronghold.offload(Residual(), store=store, weights=store, device="cpu")
    stronghold.checkpoint.load(store, again, stronghold.AdamW(again.parameters(), **ADAMW))
    assert_same_models(again, plain)


def test_a_pipe_and_a_socket_in_the_folder_stay_and_are_not_waited_for(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    stronghold.save(GPT(CONFIG), folder)
    os.mkfifo(folder / "pipe")
    monkeypatch.chdir(folder)  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")

    def waits(*_):
        raise AssertionError("it waits for someone to write into the pipe")

    before = signal.signal(signal.SIGALRM, waits)
    signal.alarm(10)
    try:
        model = GPT(CONFIG)
        stronghold.save(model, folder)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert (folder / "pipe").is_fifo() and (folder / "socket").is_socket()
    assert same(load_model(folder)[0], model)


def test_where_a_link_points_to_is_replaced_and_the_link_stays(tmp_path):
    """As to a larger disk."""
    (tmp_path / "large").mkdir()
    (tmp_path / "saved").symlink_to(tmp_path / "large" / "model")
    for _ in range(3):
        model = GPT(CONFIG)
        stronghold.save(model, tmp_path / "saved")
        assert (tmp_path / "saved").is_symlink() and os.listdir(tmp_path / "large") == ["model"]
        assert same(load_model(tmp_path / "large" / "model")[0], model)
    assert sorted(os.listdir(tmp_path)) == ["large", "saved"]


def test_a_model_is_found_where_a_process_was_killed_while_it_was_replaced(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "saved")
    model = GPT(CONFIG)
    stronghold.save(model, tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    (tmp_path / "saved").rename(tmp_path / ".saved.replaced")
    (tmp_path / ".saved.partial").mkdir()
    for name in ("saved", "link"):
        with pytest.warns(RuntimeWarning, match=r"saved\.replaced; rename") as told:
            again = stronghold.load(tmp_path / name, device="cpu", model_class=GPT)
        assert [warning.filename for warning in told] == [__file__]
        assert same(again, model)
    second = GPT(CONFIG)
    stronghold.save(second, tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link", "saved"]
    assert (tmp_path / "saved" / "tokenizer.json").exists(), "what was beside the model stays"
    assert same(load_model(tmp_path / "saved")[0], second)
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"a folder with a config\.json"):
        stronghold.load(tmp_path / "saved", device="cpu", model_class=GPT)


def test_half_of_a_model_that_was_being_removed_is_never_taken_for_one(tmp_path, monkeypatch):
    """A process that is killed while it removes the model before leaves the new one, and nothing to go back to."""
    stronghold.save(GPT(CONFIG), tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    real = shutil.rmtree

    def killed(path, **more):
        if (Path(path) / "tokenizer.json").exists():
            raise KeyboardInterrupt
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        stronghold.save(GPT(CONFIG), tmp_path / "saved")
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == [".saved.removed", "saved"]
    shutil.rmtree(tmp_path / "saved")
    model = GPT(CONFIG)
    stronghold.save(model, tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"] and not (tmp_path / "saved" / "tokenizer.json").exists()
    assert same(load_model(tmp_path / "saved")[0], model)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
def test_an_error_while_a_model_is_replaced_leaves_the_one_before(tmp_path, monkeypatch, error):
    model = GPT(CONFIG)
    stronghold.save(model, tmp_path / "saved")
    real = os.rename

    def rename(source, target, **more):
        if os.fspath(source).endswith(".partial"):
            raise error
        real(source, target, **more)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(type(error)):
        stronghold.save(GPT(CONFIG), tmp_path / "saved")
    assert os.listdir(tmp_path) == ["saved"]
    assert same(load_model(tmp_path / "saved")[0], model)


@pytest.mark.parametrize("after", [0, 1, 5, 9])
def test_a_full_disk_names_the_folder_and_leaves_the_old_model(tmp_path, monkeypatch, after):
    model = GPT(CONFIG)
    stronghold.save(model, tmp_path / "saved")
    real, calls = os.pwrite, []

    def full(file, data, offset):
        calls.append(offset)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"cannot save the model \(No space left on device.*saved") as failure:
        stronghold.save(GPT(CONFIG), tmp_path / "saved", max_shard_size="50KB")
    assert failure.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["saved"]
    assert same(load_model(tmp_path / "saved")[0], model)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"dtype must be torch\.float32"):
        stronghold.save(GPT(CONFIG), tmp_path / "saved", dtype=torch.int8)
    with pytest.raises(ValueError, match="a size must be"):
        stronghold.save(GPT(CONFIG), tmp_path / "saved", max_shard_size="many")
    with torch.device("meta"):
        empty = GPT(CONFIG)
    with pytest.raises(ValueError, match=r"embedding\.weight is on the meta device"):
        stronghold.save(empty, tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def change(folder, edit):
    """Rewrites the only file of a checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


EDITS = {
    r"missing model\.layers\.2\.mlp\.up_proj\.weight": lambda t: t.pop("model.layers.2.mlp.up_proj.weight"),
    r"with model\.layers\.4\.mlp\.up_proj\.weight, which LlamaForCausalLM lacks": lambda t: t.update(
        {"model.layers.4.mlp.up_proj.weight": torch.ones(24, 16)}
    ),
    r"model\.norm\.weight of \(15,\), the model's is \(16,\)": lambda t: t.update(
        {"model.norm.weight": torch.ones(15)}
    ),
    r"model\.norm\.weight as I32": lambda t: t.update({"model.norm.weight": torch.ones(16, dtype=torch.int32)}),
}


@pytest.mark.parametrize("message", EDITS)
def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(tmp_path, message):
    CASES["llama"].model().save_pretrained(tmp_path / "hub")
    change(tmp_path / "hub", EDITS[message])
    with pytest.raises(ValueError, match=message):
        stronghold.load(tmp_path / "hub", device="cpu", store=str(tmp_path / "store"))
    assert os.listdir(tmp_path) == ["hub"]


def test_tied_names_with_different_values_are_refused(tmp_path):
    CASES["gpt2"].model().save_pretrained(tmp_path / "hub")
    change(tmp_path / "hub", lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"].clone()}))
    stronghold.load(tmp_path / "hub", device="cpu")
    change(tmp_path / "hub", lambda t: t["lm_head.weight"][3].neg_())
    with pytest.raises(
        ValueError, match=r"lm_head\.weight and transformer\.wte\.weight are one parameter.*they differ"
    ):
        stronghold.load(tmp_path / "hub", device="cpu")


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a folder with a config\.json"):
        stronghold.load(tmp_path, device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a folder with model\.safetensors"):
        stronghold.load(tmp_path, device="cpu")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=r"cannot read .*model\.safetensors"):
        stronghold.load(tmp_path, device="cpu")
    save_file({"one": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"config\.json must be one that .* no 'model_type'"):
        stronghold.load(tmp_path, device="cpu")


def test_a_lost_shard_is_named(tmp_path):
    CASES["llama"].model().save_pretrained(tmp_path / "hub", max_shard_size="10KB")
    lost = sorted((tmp_path / "hub").glob("*.safetensors"))[1]
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(ValueError, match=f"cannot read .*{lost.name}"):
        stronghold.load(tmp_path / "hub", device="cpu")
    lost.write_bytes(kept[:-1])
    with pytest.raises(ValueError, match=f"cannot read .*{lost.name}"):
        stronghold.load(tmp_path / "hub", device="cpu")
    save_file({"other": torch.ones(1)}, lost)
    with pytest.raises(ValueError, match="shards must hold what its index names"):
        stronghold.load(tmp_path / "hub", device="cpu")


def test_a_quantised_checkpoint_is_refused(tmp_path):
    CASES["llama"].model().save_pretrained(tmp_path / "hub")
    path = tmp_path / "hub" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="quantised weights cannot be trained"):
        stronghold.load(tmp_path / "hub", device="cpu")


def test_a_model_of_any_kind_takes_its_weights_from_a_folder(tmp_path):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    whole = Normed()
    for layer in whole.layers:
        layer[1].running_mean.normal_()
        layer[1].num_batches_tracked.fill_(5)
    stronghold.save(whole, tmp_path / "saved")
    for device in ("meta", "cpu"):  # a model that has values takes the files' too
        with torch.device(device):
            model = Normed()
        stronghold.offload(model, device="cpu", weights=tmp_path / "saved")
        assert same(model, whole)


class Filled(nn.Module):
    """Layers of one number, which is the configuration's; each tensor is found in a shard of its own where asked."""

    def __init__(self, number=0.0):
        super().__init__()
        self.number = number
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(number)

    def config_dict(self):
        return {"number": self.number}

    @classmethod
    def from_config_dict(cls, settings):
        return cls(**settings)


def by_path(monkeypatch):
    """As without /proc, or where a process may open no more files."""
    monkeypatch.setattr("stronghold.formats.weight_files._most_open", lambda: 0)


def open_files(folder):
    found = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return [one for one in found if os.path.realpath(one).startswith(f"{folder}")]


@pytest.mark.parametrize("how", ["load", "weights", "load by path", "weights by path"])
@pytest.mark.parametrize("shard", ["5GB", "300"])
@pytest.mark.parametrize("after", [0, 3, 7, None])
def test_a_model_that_is_replaced_while_it_is_read_is_no_mixture_of_both(tmp_path, monkeypatch, after, shard, how):
    how, _, opened_anew = how.partition(" ")
    if opened_anew:
        by_path(monkeypatch)
    folder, reads, read = tmp_path / "latest", [], safetensors.safe_open
    stronghold.save(Filled(1.0), folder, max_shard_size=shard)
    headers = len(list(folder.glob("*.safetensors")))
    assert (headers > 1) == (shard != "5GB")

    def opened(*arguments, **options):
        reads.append(arguments)
        if after is not None and len(reads) == headers + after + 1:  # another process saves its next model there
            stronghold.save(Filled(2.0), folder, max_shard_size=shard)
        return read(*arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", opened)
    with torch.device("meta"):
        model = Filled()

    def load():
        if how == "load":
            return stronghold.load(folder, model_class=Filled, device="cpu", window=1)
        return stronghold.offload(model, device="cpu", window=1, weights=folder)

    if after is None or not opened_anew:
        assert all(torch.equal(p, torch.ones_like(p)) for p in load().parameters())
        assert open_files(tmp_path) == []
        return
    with pytest.raises(ValueError, match=r"stay as it is while it is read \(got '.*model.*safetensors', which was"):
        load()
    monkeypatch.undo()
    if how == "load":
        again = load()
        assert again.number == 2.0
        assert all(torch.equal(p, torch.full_like(p, 2)) for p in again.parameters())


@pytest.mark.parametrize("before", [1, 2, 4])
def test_shards_are_of_one_model_where_it_is_replaced_between_their_headers(tmp_path, monkeypatch, before):
    folder, reads, read = tmp_path / "latest", [], safetensors.safe_open
    stronghold.save(Filled(1.0), folder, max_shard_size="300")
    stronghold.save(Filled(2.0), tmp_path / "next", max_shard_size="300")

    def opened(*arguments, **options):
        reads.append(arguments)
        if len(reads) == before:  # one by one, as save_pretrained writes into a folder that is there
            for file in sorted((tmp_path / "next").iterdir()):
                file.rename(folder / file.name)
        return read(*arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", opened)
    with pytest.raises(ValueError, match="stay as it is while it is read"):
        WeightFiles(folder)


@pytest.mark.parametrize("by", ["descriptor", "path"])
def test_files_whose_numbers_change_are_read_and_those_written_in_place_are_not(tmp_path, monkeypatch, by):
    """A file system in user space makes numbers up, and others once the kernel has forgotten a file."""
    if by == "path":
        by_path(monkeypatch)
    stronghold.save(Filled(1.0), tmp_path / "model")
    files, stat, numbers = WeightFiles(tmp_path / "model"), os.stat, iter(range(10**6))

    def made_up(path, **options):
        found = stat(path, **options)
        if not stat_module.S_ISREG(found.st_mode):
            return found
        values = list(found.__reduce__()[1][0])
        values[1] = next(numbers)
        return os.stat_result(values, found.__reduce__()[1][1])

    monkeypatch.setattr(os, "stat", made_up)
    assert torch.equal(files.read("layers.0.weight"), torch.ones(8, 8))
    monkeypatch.undo()
    with (tmp_path / "model/model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"0000")
    os.utime(tmp_path / "model/model.safetensors", ns=(0, 1))
    with pytest.raises(ValueError, match="replaced, changed or removed meanwhile"):
        files.read("layers.0.weight")


def test_no_more_files_stay_open_than_half_of_what_the_process_may_still_open(tmp_path):
    stronghold.save(Filled(1.0), tmp_path, max_shard_size="300")
    shards = len(list(tmp_path.glob("*.safetensors")))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 4, limits[1]))
    try:
        files = WeightFiles(tmp_path)
        there = len(open_files(tmp_path))
        assert {name: files.read(name).mean().item() for name in files.entries} == dict.fromkeys(files.entries, 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert 0 < there < shards
    if (child := os.fork()) == 0:
        os._exit(int(not torch.equal(files.read("layers.0.bias"), torch.ones(8))))
    assert os.waitpid(child, 0)[1] == 0
    assert len(open_files(tmp_path)) == there
    del files
    assert open_files(tmp_path) == []


def test_a_configuration_and_weights_are_of_one_model(tmp_path):
    folder = tmp_path / "latest"
    stronghold.save(Filled(1.0), folder)
    stronghold.save(Filled(2.0), tmp_path / "next")

    class Slow(Filled):
        @classmethod
        def from_config_dict(cls, settings):
            folder.rename(tmp_path / "before")  # another process does, once the configuration was read
            (tmp_path / "next").rename(folder)
            return cls(**settings)

    with pytest.raises(ValueError, match="stay as it is while it is read"):
        stronghold.load(folder, model_class=Slow, device="cpu", window=1)


@pytest.mark.parametrize("by", ["descriptor", "path"])
def test_a_model_that_is_gone_while_it_is_read_is_read_where_it_is_open_and_else_said_to_be_so(
    tmp_path, monkeypatch, by
):
    if by == "path":
        by_path(monkeypatch)
    stronghold.save(Filled(1.0), tmp_path / "model")
    files = WeightFiles(tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    if by == "descriptor":
        assert torch.equal(files.read("layers.0.weight"), torch.ones(8, 8))
        return
    with pytest.raises(ValueError, match="replaced, changed or removed meanwhile"):
        files.read("layers.0.weight")


@pytest.mark.timeout(600)
def test_a_model_on_disk_never_is_in_memory_whole(tmp_path):
    """Created, saved, loaded, evaluated and looked at: what is resident is a few layers of 28 MB, and PyTorch."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("streaming.py"), tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(stronghold.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert peaks["model"] > 380e6
    for way in ("create", "save", "load", "evaluate", "state_dict", "save again"):
        assert peaks[way] - peaks["before"] < 0.5 * peaks["model"], (way, peaks)

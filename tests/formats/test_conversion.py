"""transformers' own conversions, as they are in the version that is installed and in earlier ones."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

import stronghold
from tests.experts import FAMILIES
from tests.reference import CASES

BUILDS: dict[str, Any] = {**FAMILIES, **{kind: CASES[kind].build for kind in ("mixtral", "bert")}}


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert not [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


@pytest.fixture(params=["installed", "5.17", "5.0"])
def make_earlier(request, monkeypatch):
    """Returns what makes of the installed transformers, as far as it converts, the one of another version."""

    def make() -> None:
        gone = {
            "installed": set(),
            "5.17": {"apply_converters", "apply_renamings"},
            "5.0": {"apply_converters", "apply_renamings", "PrefixChange"},
        }[request.param]
        there = ModuleType(core_model_loading.__name__)  # its functions still find each other
        there.__dict__.update({name: value for name, value in vars(core_model_loading).items() if name not in gone})
        monkeypatch.setitem(sys.modules, there.__name__, there)
        monkeypatch.setattr(transformers, "core_model_loading", there)
        if request.param != "5.0":
            return
        monkeypatch.delattr(core_model_loading.WeightTransform, "was_used", raising=False)
        convert = core_model_loading.WeightConverter.convert

        def with_errors(*args: Any, **more: Any) -> Any:
            results = convert(*args, **more)
            return results if isinstance(results, tuple) else (results, None)

        monkeypatch.setattr(core_model_loading.WeightConverter, "convert", with_errors)

    return make


@pytest.mark.parametrize("kind", BUILDS)
def test_files_and_models_are_those_of_transformers_by_any_version_of_it(tmp_path, make_earlier, kind):
    torch.manual_seed(1)
    whole = BUILDS[kind]()
    whole.save_pretrained(tmp_path / "hub")
    names = whole.state_dict().keys()
    assert (tensors_of(tmp_path / "hub").keys() <= names) == (kind in ("bert", "gpt_oss"))  # the others are converted
    make_earlier()
    loaded = stronghold.load(tmp_path / "hub", device="cpu", model_class=type(whole))
    assert_same(loaded.state_dict(), whole.state_dict())
    stronghold.save(loaded, tmp_path / "loaded")
    stronghold.save(whole, tmp_path / "new")
    for folder in ("loaded", "new"):
        assert_same(tensors_of(tmp_path / folder), tensors_of(tmp_path / "hub"))


def test_old_names_of_a_file_are_saved_again_and_are_given_to_no_other(tmp_path, make_earlier):
    torch.manual_seed(1)
    whole: Any = CASES["bert"].build()
    whole.save_pretrained(tmp_path / "hub")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors_of(tmp_path / "hub").items()
    }
    assert sum(name.endswith(("gamma", "beta")) for name in old) > 4
    save_file(old, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
    make_earlier()
    loaded = stronghold.load(tmp_path / "hub", device="cpu", model_class=type(whole))
    assert_same(loaded.state_dict(), whole.state_dict())
    stronghold.save(loaded, tmp_path / "again")
    assert_same(tensors_of(tmp_path / "again"), old)

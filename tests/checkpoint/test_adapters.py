"""Models with adapters of PEFT's are saved as PEFT saves them, from wherever they live."""

import copy
import errno
import json
import os

import peft
import pytest
import torch
from safetensors.torch import load_file

import stronghold
from stronghold.checkpoint.pretrained import save_with_others
from stronghold.errors import OffloadedModelError
from stronghold.unit import unit_of
from tests.reference import CASES, train

CASE = CASES["llama"]
TARGETS = ["q_proj", "v_proj"]


def lora(**settings):
    return peft.LoraConfig(r=4, target_modules=TARGETS, **settings)


def adapted(config=None, more=()):
    torch.manual_seed(1)
    model = peft.get_peft_model(CASE.model(3), config or lora())
    for name in more:
        model.add_adapter(name, lora())
    return model


def adapted_by_transformers():
    torch.manual_seed(1)
    model = CASE.model(3)
    model.add_adapter(lora())
    return model


def learned(model, steps=2, **settings):
    """Offloads and trains; the last update is under way."""
    model = stronghold.offload(model, device="cpu", window=2, **settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = stronghold.AdamW(trained, lr=1e-2)
    train(model, optimizer, CASE.batches(steps))
    return model, optimizer


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype is other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("store", ["ram", "disk"])
@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_are_saved_as_peft_saves_them(tmp_path, store, modules_to_save):
    store = store if store == "ram" else str(tmp_path / "store")
    model, _ = learned(adapted(lora(modules_to_save=modules_to_save)), store=store)
    stronghold.save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    assert not (tmp_path / "ours" / "config.json").exists()
    written = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    assert_same(written, load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    assert len(written) == 16 + bool(modules_to_save)  # of four layers, two matrices of each of two targets
    again = peft.PeftModel.from_pretrained(CASE.model(3), tmp_path / "ours").train()
    assert_same(dict(again.state_dict()), {name: tensor.clone() for name, tensor in model.state_dict().items()})


def test_several_adapters_go_into_folders_of_their_names_and_saving_again_replaces_them(tmp_path):
    model, _ = learned(adapted(more=["other"]))
    stronghold.save(adapted(more=["other"]), tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_text("kept")
    stronghold.save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    for folder in (".", "other"):
        name = f"{folder}/adapter_model.safetensors"
        assert_same(load_file(tmp_path / "ours" / name), load_file(tmp_path / "theirs" / name))
    assert (tmp_path / "ours" / "tokenizer.json").read_text() == "kept"
    stronghold.save(CASE.model(), tmp_path / "ours")  # a whole model in their place
    assert not list((tmp_path / "ours").glob("adapter_*"))


@pytest.mark.parametrize(("shards", "links"), [("5GB", True), ("20KB", False)], ids=["linked", "copied in shards"])
@pytest.mark.parametrize("own", ["peft", "transformers"])
def test_a_model_stays_in_the_folder_where_its_adapters_go(tmp_path, monkeypatch, own, shards, links):
    """All that saving a model replaces was deleted there: the base itself, where its folder was named."""
    for name in ("ours", "theirs"):
        CASE.model(3).save_pretrained(tmp_path / name, max_shard_size=shards)
        (tmp_path / name / "README.md").write_text("mine\n")
    before = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    weights = next(name for name in before if name.endswith(".safetensors"))
    os.link(tmp_path / "ours" / weights, tmp_path / "held")
    model, _ = learned(adapted() if own == "peft" else adapted_by_transformers())
    model.save_pretrained(tmp_path / "theirs")
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    for _ in range(2):  # the second time over adapters
        stronghold.save(model, tmp_path / "ours")
        after = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
        assert after.keys() == {path.name for path in (tmp_path / "theirs").iterdir()}
        assert {name: after.get(name) for name in before} == before | {"README.md": after["README.md"]}
        assert b"mine" in after["README.md"]
        assert (tmp_path / "ours" / weights).samefile(tmp_path / "held") is links
        assert sorted(os.listdir(tmp_path)) == ["held", "ours", "theirs"]
    written, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert_same(written, theirs)
    assert len(written) == 16


def no_links(*paths, **more):
    raise OSError(errno.EPERM, "Operation not permitted")  # such as exFAT's


def full(*arguments, **more):
    raise OSError(errno.ENOSPC, "No space left on device")


def of_folder(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("end", ["weights", "others"])
@pytest.mark.parametrize("own", ["peft", "transformers"])
def test_a_full_disk_leaves_every_file_of_the_folder_as_it_was(tmp_path, monkeypatch, own, end):
    """What was linked into the new folder was written in place there, and so in the old one."""
    CASE.model(3).save_pretrained(tmp_path / "ours")
    (tmp_path / "blob").write_text("mine, elsewhere\n")
    for name in ("generation_config.json", "emoji.json", "other/notes.txt"):
        (tmp_path / "ours" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "ours" / name).write_text('{"max_length": 77}')
    (tmp_path / "ours" / "README.md").symlink_to(tmp_path / "blob")  # as in the hub's cache
    before = of_folder(tmp_path)
    model = adapted(more=["other"]) if own == "peft" else adapted_by_transformers()

    def write(folder):
        (folder / "emoji.json").write_text("{}")
        if end == "others" and failing:
            full()

    failing = True

    def save():
        save_with_others(model, tmp_path / "ours", write, lambda path: False)

    with monkeypatch.context() as patch:
        if end == "weights":
            module = "peft.peft_model" if own == "peft" else "transformers.modeling_utils"
            patch.setattr(f"{module}.safe_save_file", full)
        with pytest.raises(OSError, match=r"cannot save the model \(No space left on device"):
            save()
    assert of_folder(tmp_path) == before
    failing = False
    save()
    after = of_folder(tmp_path)
    written = {name for name in before if after[name] != before[name]}
    assert written == {"ours/emoji.json", "ours/README.md" if own == "peft" else "ours/generation_config.json"}
    assert before["blob"] in after["ours/README.md"]


@pytest.mark.parametrize("own", ["peft", "transformers"])
def test_in_bf16_the_masters_are_written_to_the_bit(tmp_path, own):
    model, _ = learned(adapted() if own == "peft" else adapted_by_transformers(), dtype=torch.bfloat16)
    before = model.config.to_dict()
    stronghold.save(model, tmp_path / "masters", dtype=torch.float32)
    stronghold.save(model, tmp_path / "bf16")
    assert model.config.to_dict() == before
    masters = load_file(tmp_path / "masters" / "adapter_model.safetensors")
    written = load_file(tmp_path / "bf16" / "adapter_model.safetensors")
    model.save_pretrained(tmp_path / "theirs")
    assert_same(written, load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    found = 0
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            continue
        name = name.replace(".default", "") if own == "peft" else f"base_model.model.{name.replace('.default', '')}"
        master = unit_of(parameter).master(parameter.__dict__["_index"])
        assert torch.equal(masters[name], master), name
        assert torch.equal(written[name], parameter), name
        found += not torch.equal(master.bfloat16().float(), master)
    assert found == len(masters) == 16
    if own == "transformers":
        again = CASE.model(3)
        again.load_adapter(str(tmp_path / "masters"))
        assert torch.equal(
            again.state_dict()["model.layers.1.self_attn.v_proj.lora_B.default.weight"],
            masters["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"],
        )


def test_adapters_whose_ranks_have_changed_are_saved_as_peft_saves_them(tmp_path):
    """AdaLoRA gives up ranks as it trains, and saves those that are left."""
    config = peft.AdaLoraConfig(
        init_r=6, target_r=2, tinit=1, tfinal=1, deltaT=1, total_step=8, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    models = [adapted(config), stronghold.offload(adapted(config), device="cpu", window=2)]
    for model in models:
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
        for step, batch in enumerate(CASE.batches(3)):
            torch.manual_seed(step)  # of dropout
            model(**batch).loss.backward()
            optimizer.step()
            model.base_model.update_and_allocate(step)
            optimizer.zero_grad()
    stronghold.save(models[1], tmp_path / "ours")
    models[1].save_pretrained(tmp_path / "theirs")
    models[0].save_pretrained(tmp_path / "plain")
    found = [load_file(tmp_path / of / "adapter_model.safetensors") for of in ("ours", "theirs", "plain")]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])
    assert any(len(tensor) < 6 for name, tensor in found[0].items() if name.endswith("lora_E"))
    configs = [json.loads((tmp_path / of / "adapter_config.json").read_text()) for of in ("ours", "plain")]
    assert configs[0]["rank_pattern"] == configs[1]["rank_pattern"] != {}


def test_prompts_are_saved_as_peft_computes_them_or_refused_in_another_type(tmp_path):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    torch.manual_seed(1)
    model = stronghold.offload(peft.get_peft_model(CASE.model(3), config), device="cpu", dtype=torch.bfloat16)
    stronghold.save(model, tmp_path / "ours")
    (prompts,) = load_file(tmp_path / "ours" / "adapter_model.safetensors").values()
    assert torch.equal(prompts, model.get_parameter("prompt_encoder.default.embedding.weight"))
    with pytest.raises(ValueError, match=r"dtype must be None .*got torch\.float32 for prompt_embeddings"):
        stronghold.save(model, tmp_path / "masters", dtype=torch.float32)
    assert not (tmp_path / "masters").exists()


@pytest.mark.parametrize("part", ["base_model", "base_model.model"])
def test_a_part_of_a_model_with_adapters_is_refused(tmp_path, part):
    model, _ = learned(adapted())
    with pytest.raises(ValueError, match=r"must be saved by the PeftModel around it .*q_proj.*get_peft_model\(\) ret"):
        stronghold.save(model.get_submodule(part), tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def test_several_adapters_of_transformers_own_are_refused(tmp_path):
    model = CASE.model(3)
    model.add_adapter(lora(), "one")
    model.add_adapter(lora(), "two")
    with pytest.raises(ValueError, match=r"saved with the one that is active \(got one, two\); delete the others"):
        stronghold.save(model, tmp_path / "ours")


def test_a_merged_model_is_saved_whole(tmp_path):
    merged = adapted().merge_and_unload()
    stronghold.save(stronghold.offload(merged, device="cpu"), tmp_path / "ours")
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "llama"
    again = type(merged).from_pretrained(tmp_path / "ours")
    assert_same(dict(again.state_dict()), dict(merged.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_adapters_are_merged_where_the_base_is(tmp_path, store, dtype):
    store = store if store == "ram" else str(tmp_path / "store")
    plain, given = (adapted(lora(init_lora_weights=False)).to(dtype).eval() for _ in range(2))
    model = stronghold.offload(given, device="cpu", window=2, store=store)
    before, (batch,) = logits(model), CASE.batches(1)
    for one in (model, plain):
        one.merge_adapter()
    merged = logits(model)
    assert torch.equal(merged, logits(plain)) and not torch.equal(merged, before)
    weights = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): weight
        for name, weight in model.state_dict().items()
        if "lora_" not in name
    }
    model.get_base_model().save_pretrained(tmp_path / "merged", state_dict=weights)
    whole = plain.merge_and_unload()
    assert_same(dict(type(whole).from_pretrained(tmp_path / "merged").state_dict()), dict(whole.state_dict()))
    model.merge_and_unload()
    with pytest.raises(OffloadedModelError, match=r"nothing may go or be replaced .*q_proj was another module"):
        model(**batch)


@torch.no_grad()
def logits(model):
    (batch,) = CASE.batches(1)
    return model(**batch).logits


@pytest.mark.parametrize("config", [lora(), lora(use_dora=True), peft.IA3Config(target_modules=TARGETS)])
def test_the_files_of_a_base_stream_into_a_model_with_adapters(tmp_path, config):
    """Its parameters are on the meta device, and have other names than in the files; the adapters have their values."""
    base = CASE.model(3)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    plain = peft.get_peft_model(base, config)
    model = copy.deepcopy(plain)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    for parameter in [*model.parameters()]:
        if id(parameter) not in trained:
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False))
    model = stronghold.offload(model, weights=tmp_path / "base", device="cpu", window=2)
    losses = [
        train(one, torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2), CASE.batches(3))
        for one in (model, plain)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    "config",
    [
        lora(modules_to_save=["lm_head"]),
        lora(modules_to_save=["lm_head", "embed_tokens"]),
        lora(trainable_token_indices=[3, 5]),
    ],
    ids=["head", "head and embedding", "tokens"],
)
def test_what_trains_as_a_whole_begins_with_the_values_of_the_files(tmp_path, config):
    """The copies that PEFT makes of modules without values have none; rows of an embedding must have theirs."""
    base = CASE.model(3)
    base.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    plain = peft.get_peft_model(base, config)
    model = copy.deepcopy(plain)
    names = {name for name, _ in model.named_parameters() if "lora_" not in name and "_delta" not in name}
    for name, parameter in [*model.named_parameters()]:
        if name in names:
            empty = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            torch.utils.swap_tensors(parameter, empty)
    model = stronghold.offload(model, weights=tmp_path / "base", device="cpu", window=2)
    assert_same(dict(model.state_dict()), plain.state_dict())
    losses = [
        train(one, torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2), CASE.batches(3))
        for one in (model, plain)
    ]
    assert losses[0] == losses[1]
    assert_same(dict(model.state_dict()), plain.state_dict())


def test_trainable_tokens_without_values_are_refused_and_told_when_to_come(tmp_path):
    CASE.model(3).save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        model = CASE.model(3)
    model = peft.get_peft_model(model, lora(trainable_token_indices=[3, 5]))
    with pytest.raises(ValueError, match=r"rows of the embedding, .*embed_tokens.*first, then call get_peft_model"):
        stronghold.offload(model, weights=tmp_path / "base", device="cpu", window=2)


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_base_that_is_loaded_frozen_learns_the_same_and_never_had_what_training_takes(tmp_path, store):
    where = store if store == "ram" else str(tmp_path / "store")
    CASE.model(3).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    plain = type(CASE.model(3)).from_pretrained(tmp_path / "base")
    model = stronghold.load(tmp_path / "base", frozen=True, device="cpu", window=2, store=where)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    report = stronghold.report(model)
    assert report.trainable_parameters == 0
    if store == "ram":  # no remainders of 16 bits
        assert report.host_bytes <= sum(-(-p.nbytes // 64) * 64 for p in plain.parameters())
    else:  # whole pages of 4 KiB
        assert report.disk_bytes <= sum(-(-p.nbytes // 4096) * 4096 for p in plain.model.layers.parameters())
    torch.manual_seed(2)
    batches = CASE.batches(3)
    losses = []
    for one in (model, plain):
        torch.manual_seed(1)
        one = peft.get_peft_model(one, lora(init_lora_weights=False)).train()
        trained = [p for p in one.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        losses.append(train(one, torch.optim.AdamW(trained, lr=1e-2), batches))
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_adapters_without_values_are_refused_where_the_base_streams_in(tmp_path):
    CASE.model(3).save_pretrained(tmp_path / "base")
    with torch.device("meta"):
        model = peft.get_peft_model(CASE.model(3), lora())
    with pytest.raises(ValueError, match=r"missing .*lora_A"):
        stronghold.offload(model, weights=tmp_path / "base", device="cpu", window=2)

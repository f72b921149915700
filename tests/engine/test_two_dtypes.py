"""Layers whose parameters are of two dtypes: each computes, is updated and is kept in its own."""

import contextlib
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.errors import OffloadedModelError
from stronghold.layout import ALIGNMENT_BYTES
from stronghold.split import join
from stronghold.unit import grad_meta_of, unit_of
from tests.crossed import crossed
from tests.reference import CASES, differences, snapshot
from tests.replicas import in_threads

peft = pytest.importorskip("peft")
CASE = CASES["llama"]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def adapted():
    """Returns a Llama in bf16 with adapters in fp32, as PEFT makes them."""
    torch.manual_seed(1)
    model = peft.get_peft_model(CASE.model(3).to(torch.bfloat16), peft.LoraConfig(**LORA)).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)  # zeros would leave the others without a gradient
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    return model


class Norms(nn.Module):
    """A layer that is trained in both: its norm in fp32, the rest in bf16."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 24, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.down = nn.Linear(24, 16, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(5, 1)[:1].clone())

    def forward(self, x):
        inner = torch.tanh(self.up(self.norm(x.float()).to(torch.bfloat16)))
        return x + (self.down(inner).float() * self.scale).to(torch.bfloat16)


def both():
    torch.manual_seed(2)
    return nn.Sequential(*(Norms() for _ in range(4)))


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def losses(model, optimizer, *, autocast=False, steps=4, accumulation=1, clip=None):
    found = []
    torch.manual_seed(7)
    for number, batch in enumerate(CASE.batches(steps * accumulation)):
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(**batch).loss
        (loss / accumulation).backward()
        found.append(loss.item())
        if number % accumulation == accumulation - 1:
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained(model), clip)
            optimizer.step()
            optimizer.zero_grad()
    return found


def squares(model, optimizer, steps=3, accumulation=2):
    """Trains on numbers; returns the losses."""
    generator, found = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        for _ in range(accumulation):
            loss = model(torch.randn(3, 4, 16, generator=generator).to(torch.bfloat16)).float().square().mean()
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("settings", "loop", "autocast"),
    [
        ({"window": 1}, {}, True),
        pytest.param({"window": 1}, {}, False, marks=pytest.mark.long),
        ({"window": 2, "activations": "keep"}, {"accumulation": 2, "clip": 0.5}, False),
        pytest.param(
            {"window": 2, "activations": "keep"}, {"accumulation": 2, "clip": 0.5}, True, marks=pytest.mark.long
        ),
        ({"window": 1, "resident": 2}, {"accumulation": 2, "clip": 0.5}, True),
        pytest.param({"window": 1, "resident": 2}, {"accumulation": 2, "clip": 0.5}, False, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_adapters_in_fp32_on_a_base_in_bf16_learn_the_bits_that_they_learn_in_memory(settings, loop, autocast):
    found = []
    for model in (adapted(), stronghold.offload(adapted(), device="cpu", **settings)):
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2, foreach=True)
        found.append((losses(model, optimizer, autocast=autocast, **loop), dict(model.state_dict())))
    assert len(set(found[0][0])) == len(found[0][0]) >= 4
    assert found[1][0] == found[0][0]
    for (name, value), other in zip(found[1][1].items(), found[0][1].values(), strict=True):
        assert value.dtype == other.dtype, name
        assert torch.equal(value, other), name


@pytest.mark.parametrize("adamw", [{}, {"max_grad_norm": 0.5}], ids=str)
def test_our_optimizer_updates_them_in_fp32(adamw):
    plain, model = adapted(), stronghold.offload(adapted(), device="cpu", window=1)
    expected = losses(plain, torch.optim.AdamW(trained(plain), lr=1e-3), steps=3, clip=adamw.get("max_grad_norm"))
    optimizer = stronghold.AdamW(trained(model), lr=1e-3, **adamw)
    got = losses(model, optimizer, steps=3)
    assert got[0] == expected[0]
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if not parameter.requires_grad:
            assert torch.equal(parameter, other), name
            continue
        unit, index = unit_of(parameter), parameter.__dict__["_index"]
        assert unit.remainder(index) is None, name
        torch.testing.assert_close(parameter.detach(), other.detach(), rtol=2e-3, atol=3e-6, msg=name)


@pytest.mark.parametrize(
    ("build", "settings"),
    crossed(
        [both, adapted],
        [
            {"window": 2},
            {"window": 1, "store": "disk"},
            {"window": 1, "activations": "host"},
            {"window": 2, "update": "in_backward"},
            {"window": 1, "store": "disk", "update": "in_backward"},
            {"window": 1, "resident": 2},
        ],
        together=1,
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_every_window_store_and_update_trains_the_same_bits(tmp_path, build, settings):
    found = []
    for number, one in enumerate(({"window": 1}, settings)):
        one = dict(one)
        update = one.pop("update", "deferred")
        if "store" in one:
            one["store"] = tmp_path / str(number)
        model = stronghold.offload(build(), device="cpu", layers=None if build is adapted else "", **one)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2, update=update)
        of_kind = losses if build is adapted else squares
        accumulation = 1 if "in_backward" in str(settings) else 2
        found.append((of_kind(model, optimizer, accumulation=accumulation), snapshot(model, optimizer)))
    assert len(set(found[0][0])) == len(found[0][0])
    assert found[1][0] == found[0][0]
    assert differences(found[1][1], found[0][1]) == []


def test_masters_and_low_halves_are_of_what_computes_in_bf16():
    model = stronghold.offload(both(), device="cpu", layers="", window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    layer = model[1]
    unit = unit_of(layer.up.weight)
    names = {name: parameter.__dict__["_index"] for name, parameter in layer.named_parameters()}
    in_bf16 = {index for name, index in names.items() if name.startswith(("up", "down"))}
    assert unit.master_places() == sorted(in_bf16)
    elements = sum(unit.counts[index] for index in in_bf16)
    assert 2 * elements <= unit.gradients.sum_bytes() < 2 * elements + ALIGNMENT_BYTES * len(names)
    assert unit.layout.total_bytes >= 2 * elements + 4 * (unit.elements - elements)
    assert stronghold.report(model).dtype == "bfloat16 and float32"
    assert stronghold.report(stronghold.offload(adapted(), device="cpu")).dtype == "bfloat16 and float32"
    squares(model, optimizer)
    for name, index in names.items():
        assert unit.master(index).dtype == torch.float32
        assert (unit.remainder(index) is not None) == (index in in_bf16), name
        assert layer.get_parameter(name).dtype == (torch.bfloat16 if index in in_bf16 else torch.float32), name
    with pytest.raises(OffloadedModelError, match="keeps its shape and dtype"):
        layer.norm.weight.data = torch.ones(16, dtype=torch.bfloat16)
    layer.norm.weight.data = torch.full((16,), 1 + 2**-20)
    assert torch.equal(layer.norm.weight.detach(), torch.full((16,), 1 + 2**-20))
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(OffloadedModelError, match="stays on cpu with dtype"):
            model.to(dtype)
    assert model.to("cpu") is model


def test_the_sum_of_gradients_in_bf16_is_that_of_a_layer_in_bf16_alone():
    """Beside parameters in fp32 those in bf16 lose nothing: their sums are taken in fp32, by the same bits."""
    model = stronghold.offload(both(), device="cpu", layers="", window=1)
    optimizer = stronghold.AdamW(model.parameters())  # without one nobody asks for squares, and nothing is known
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(3, 4, 16, generator=generator).to(torch.bfloat16) for _ in range(3)]
    single: dict[str, list[torch.Tensor]] = {}
    for x in inputs:
        plain = both()
        plain(x).float().square().mean().backward()
        for name, parameter in plain.named_parameters():
            single.setdefault(name, []).append(parameter.grad.float())
        model(x).float().square().mean().backward()
    for name, parameter in model.named_parameters():
        known, expected = grad_meta_of(parameter.grad), single[name][0] + single[name][1] + single[name][2]
        assert (known.remainder is not None) == (parameter.dtype == torch.bfloat16), name
        got = parameter.grad if known.remainder is None else join(parameter.grad, known.remainder)
        assert torch.equal(got, expected), name
    assert optimizer.param_groups


@pytest.mark.parametrize(("build", "store"), crossed([both, adapted], ["ram", "disk", "in place"], together=1))
def test_a_run_resumes_to_the_bit(tmp_path, build, store):
    run, layers = losses if build is adapted else squares, None if build is adapted else ""

    def begun(name, **settings):
        settings |= {} if store == "ram" else {"store": tmp_path / name}
        model = stronghold.offload(build(), device="cpu", layers=layers, window=2, **settings)
        return model, stronghold.AdamW(trained(model), lr=1e-2)

    model, optimizer = begun("first")
    run(model, optimizer, steps=2)
    directory = tmp_path / ("first" if store == "in place" else "checkpoint")
    stronghold.checkpoint.save(directory, model, optimizer)
    if store == "in place":  # a copy, for the directory itself is in use
        shutil.copytree(directory, tmp_path / "copy")
        directory = tmp_path / "copy"
    expected = run(model, optimizer, steps=2), snapshot(model, optimizer)
    if store == "in place":
        again, another = begun("copy", weights=directory)
    else:
        again, another = begun("second")
    stronghold.checkpoint.load(directory, again, another)
    assert run(again, another, steps=2) == expected[0]
    assert differences(snapshot(again, another), expected[1]) == []


@pytest.mark.parametrize(("build", "update"), crossed([both, adapted], ["deferred", "in_backward"], together=1))
def test_replicas_with_the_same_data_train_the_bits_of_one(build, update):
    """Half of the sum of two equal gradients is that gradient: none is read as one of the other dtype."""
    layers = None if build is adapted else ""
    run = {"steps": 3, "accumulation": 1}

    def one(replicas):
        model = offload_shared(models[replicas.local_rank], replicas, device="cpu", window=1, layers=layers)
        copies = model.parameters() if replicas.local_rank else ()
        everyone = replicas.everyone
        engine_of(model).join(everyone, shared={}, copies=copies, model="Model", passes=1, here=everyone.world_size)
        optimizer = stronghold.AdamW(trained(model), lr=1e-2, threads=1, update=update)
        found = squares(model, optimizer, **run) if build is both else together(model, optimizer)
        return found, snapshot(model, optimizer)

    def together(model, optimizer):
        found = []
        for batch in CASE.batches(3):
            loss = model.eval()(**batch).loss  # dropout draws from the generator that both threads have
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model = stronghold.offload(build(), device="cpu", window=1, layers=layers)
    optimizer = stronghold.AdamW(trained(model), lr=1e-2)
    expected = squares(model, optimizer, **run) if build is both else together(model, optimizer)
    kept = snapshot(model, optimizer)
    models = [build(), build()]
    for found, state in in_threads(2, one):
        assert found == expected
        assert differences(state, kept) == []


def test_each_is_saved_in_its_own_dtype(tmp_path):
    model = stronghold.offload(both(), device="cpu", layers="", window=1)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    squares(model, optimizer)
    stronghold.save(model, tmp_path / "own")
    stronghold.save(model, tmp_path / "masters", dtype=torch.float32)
    own, masters = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "masters"))
    for name, parameter in model.named_parameters():
        unit, index = unit_of(parameter), parameter.__dict__["_index"]
        assert own[name].dtype == parameter.dtype, name
        assert torch.equal(own[name], parameter.detach()), name
        assert torch.equal(masters[name], unit.master(index)), name
    kept = snapshot(model, optimizer)
    stronghold.checkpoint.save(tmp_path / "dcp", model, optimizer, format="dcp")
    again = stronghold.offload(both(), device="cpu", layers="", window=1)
    another = stronghold.AdamW(again.parameters(), lr=1e-2)
    stronghold.checkpoint.load(tmp_path / "dcp", again, another, format="dcp")
    assert differences(snapshot(again, another), kept) == []


def test_a_router_that_converts_itself_is_told_its_dtype_by_the_configuration():
    """Switch Transformers' routers compute in fp32 by ``self.classifier.to()``, in every forward pass."""

    def build(**router):
        torch.manual_seed(0)
        config = transformers.SwitchTransformersConfig(
            vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, num_experts=4, dropout_rate=0.0,
            num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, decoder_start_token_id=0, router_jitter_noise=0.0,
            **router,
        )  # fmt: skip
        return transformers.SwitchTransformersForConditionalGeneration(config).train()

    ids = torch.randint(5, 48, (4, 8), generator=torch.Generator().manual_seed(0))
    model = stronghold.offload(build(), device="cpu", window=2, dtype=torch.bfloat16)
    with pytest.raises(
        OffloadedModelError, match=r"got a move to cpu, torch.float32\); .*configuration .*router_dtype="
    ):
        model(input_ids=ids, labels=ids)
    plain = build(router_dtype="bfloat16").to(torch.bfloat16)
    model = stronghold.offload(build(router_dtype="bfloat16"), device="cpu", window=2, dtype=torch.bfloat16)
    losses = [one(input_ids=ids, labels=ids).loss for one in (plain, model)]
    assert torch.equal(losses[0], losses[1])
    for loss in losses:
        loss.backward()
    for (name, p), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (other.grad is None), name
        assert p.grad is None or torch.equal(p.grad, other.grad), name

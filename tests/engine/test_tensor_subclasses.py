"""A base that torchao has quantised, in tensor subclasses, goes through the window as the tensors within them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import stronghold
from stronghold.errors import CheckpointError
from tests.adapters import PLACES, base, batches, offload, train, trained, with_adapters

quantization = pytest.importorskip("torchao.quantization")

LORA = peft.LoraConfig(r=2, target_modules="all-linear")
STREAMED = [place for place in PLACES if "micro_batch" not in place and place.get("activations") != "keep"]
INT8 = quantization.Int8WeightOnlyConfig
FLOAT8 = quantization.Float8WeightOnlyConfig


def quantised(config: Any = INT8, *, dtype: torch.dtype = torch.bfloat16, head: bool = False, **more: Any) -> nn.Module:
    """Returns a Llama whose layers' linear weights torchao has quantised, and the head's with ``head``."""
    model = base(dtype, **more)
    quantization.quantize_(model if head else model.model.layers, config() if callable(config) else config)
    return model.requires_grad_(False)


def cells(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of all weights that are subclasses, by name."""
    return {
        f"{name}.{cell}": getattr(parameter, cell)
        for name, parameter in model.named_parameters()
        if hasattr(parameter, "__tensor_flatten__")
        for cell in parameter.__tensor_flatten__()[0]
    }


def evaluated(model: nn.Module) -> list[float]:
    with torch.no_grad():
        return [model.eval()(input_ids=ids, labels=ids).loss.item() for ids in batches(2)]


CASES = [
    *(
        pytest.param(INT8, place, "adapters", marks=() if "resident" in place else pytest.mark.long)
        for place in STREAMED
        if place
    ),
    pytest.param(INT8, {"window": 2, "store": "disk"}, "offload", marks=pytest.mark.long),
    (FLOAT8, {"window": 2, "store": "disk"}, "offload"),
    pytest.param(FLOAT8, {"window": 1}, "adapters", marks=pytest.mark.long),
    (quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4), {"window": 1}, "adapters"),
]


@pytest.mark.parametrize(("config", "settings", "first"), CASES, ids=str)
def test_adapters_learn_the_bits_that_they_learn_in_memory(
    tmp_path: Path, config: Any, settings: dict[str, Any], first: str
) -> None:
    head = first == "adapters"
    plain = with_adapters(quantised(config, head=head), LORA)
    if first == "adapters":
        model = offload(tmp_path, with_adapters(quantised(config, head=head), LORA), **settings)
    else:
        model = with_adapters(offload(tmp_path, quantised(config, head=head), **settings), LORA)
    rows = []
    for one in (plain, model):
        optimizer = torch.optim.AdamW(trained(one), lr=1e-2, foreach=False)
        rows.append(train(one, optimizer, accumulation=2) + evaluated(one) + train(one.train(), optimizer, steps=2))
    assert len(set(rows[0])) > 8
    assert rows[1] == rows[0]
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(dict(model.named_parameters())[name], parameter), name
    there = cells(model)
    assert len(there) >= 2 * 7 * 4
    for name, value in cells(plain).items():
        assert torch.equal(there[name], value), name
    assert model.state_dict().keys() == plain.state_dict().keys()


def test_a_base_takes_what_its_tensors_take() -> None:
    shape = {"hidden_size": 128, "intermediate_size": 320}  # a tensor begins at a multiple of 64 bytes
    model = quantised(**shape)
    packed = sum(cell.nbytes for cell in cells(model).values())
    weights = [p for p in model.parameters() if hasattr(p, "__tensor_flatten__")]
    per_row = sum(p.shape[0] for p in weights) / sum(p.numel() for p in weights)
    assert packed / sum(p.numel() for p in weights) == pytest.approx(1 + (4 + 1) * per_row)  # scale and zero point
    others = sum(p.numel() * 2 for p in model.parameters() if not hasattr(p, "__tensor_flatten__"))
    stronghold.offload(model, device="cpu", window=1)
    report = stronghold.report(model)
    assert packed + others <= report.host_bytes <= 1.02 * (packed + others)
    assert report.parameters == sum(p.numel() for p in base(**shape).parameters())
    assert report.dtype == "bfloat16, weights as Int8Tensor"


def test_a_checkpoint_goes_on_to_the_bit_and_is_of_one_type(tmp_path: Path) -> None:
    def begun(config: Any, seed: int, place: str) -> tuple[nn.Module, stronghold.AdamW]:
        model = quantised(config)
        torch.manual_seed(seed)
        for name, cell in cells(model).items():
            if seed and name.endswith("qdata"):
                cell.copy_(torch.randint(-99, 99, cell.shape).to(cell.dtype))
        model = offload(tmp_path / place, with_adapters(model, LORA), window=2, store="disk")
        return model, stronghold.AdamW(trained(model), lr=1e-2)

    model, optimizer = begun(INT8, 0, "first")
    train(model, optimizer, steps=2)
    for directory in (tmp_path / "kept", tmp_path / "first" / "store"):
        stronghold.checkpoint.save(directory, model, optimizer)
    expected = train(model, optimizer, steps=2)
    other, its_optimizer = begun(INT8, 1, "second")
    assert evaluated(other) != evaluated(model)
    stronghold.checkpoint.load(tmp_path / "kept", other.train(), its_optimizer)
    assert train(other, its_optimizer, steps=2) == expected
    model, optimizer = begun(FLOAT8, 0, "third")
    with pytest.raises(CheckpointError, match=r"q_proj[a-z_.]*\.weight\.(Int8|Float8)Tensor\.qdata"):
        stronghold.checkpoint.load(tmp_path / "kept", model, optimizer)
    stronghold.checkpoint.save(tmp_path / "float8", model, optimizer)
    other, its_optimizer = begun(FLOAT8, 1, "fourth")
    stronghold.checkpoint.load(tmp_path / "float8", other, its_optimizer)
    assert evaluated(other) == evaluated(model)


def test_a_copy_of_it_is_a_model_in_memory() -> None:
    model = stronghold.offload(quantised(), device="cpu", window=1)
    copied = copy.deepcopy(model)
    assert type(copied.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert {type(cell) for cell in cells(copied).values()} == {nn.Parameter}
    assert evaluated(copied) == evaluated(model) == evaluated(quantised())


def test_an_optimizer_takes_all_parameters_and_a_model_is_not_saved_without_its_scales(tmp_path: Path) -> None:
    model = offload(tmp_path, with_adapters(quantised(), LORA), window=2, store="disk")
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    other = offload(tmp_path, with_adapters(quantised(), LORA), window=1)
    its_optimizer = stronghold.AdamW(trained(other), lr=1e-2)
    train(other, its_optimizer, steps=2)
    expected = train(other, its_optimizer, steps=1)
    train(model, optimizer, steps=2)
    stronghold.checkpoint.save(tmp_path / "store", model, optimizer)
    stronghold.close(model)
    model = stronghold.offload(
        with_adapters(quantised(), LORA), device="cpu", window=2, store=tmp_path / "store", weights=tmp_path / "store"
    )
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2)
    stronghold.checkpoint.load(tmp_path / "store", model, optimizer)
    assert train(model, optimizer, steps=1) == expected
    with pytest.raises(ValueError, match=r"are not written by stronghold.save \(got model.layers.0.self_attn.q_proj.w"):
        stronghold.save(quantised(), tmp_path / "saved")


def test_a_write_into_a_tensor_within_is_seen() -> None:
    model, other = stronghold.offload(quantised(), device="cpu", window=2), quantised()
    before = evaluated(model)
    for one in (model, other):
        with torch.no_grad():
            one.model.layers[1].mlp.up_proj.weight.qdata.neg_()
    assert evaluated(model) == evaluated(other) != before


class Opaque(torch.Tensor):
    """A quantised weight whose kernel is for evaluation alone."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Opaque:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Opaque:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"no kernel for {function}")


class Shifted(torch.Tensor):
    """A quantised weight of int8, with a scale and a zero point a row."""

    @staticmethod
    def __new__(cls, *inner: Tensor) -> Shifted:
        return Tensor._make_wrapper_subclass(cls, inner[0].shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor) -> None:
        self.codes, self.scale, self.zero = codes, scale, zero

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale", "zero"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], *_: Any) -> Shifted:
        return cls(inner["codes"], inner["scale"], inner["zero"])

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is nn.functional.linear:
            own = args[1]
            return nn.functional.linear(args[0], (own.codes - own.zero.float()) * own.scale, *args[2:])
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].zero)
        raise NotImplementedError(f"no kernel for {function}")


@pytest.mark.parametrize("kind", [torch.int64, torch.int16, torch.float64, torch.bool, torch.uint16])
def test_what_a_quantised_weight_consists_of_may_be_of_any_dtype(tmp_path: Path, kind: torch.dtype) -> None:
    def model() -> nn.Module:
        torch.manual_seed(2)
        made = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)))
        for layer in made:
            codes, scale = torch.randint(-99, 99, (16, 16), dtype=torch.int8), torch.rand(16, 1) / 99
            weight = Shifted(codes, scale, torch.randint(0, 2, (16, 1)).to(kind))
            layer[0].weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[index]
        return made

    def losses(one: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(3):
            loss = one(torch.linspace(-1, 1, 64).view(4, 16)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def offloaded(**settings: Any) -> tuple[nn.Module, stronghold.AdamW]:
        made = stronghold.offload(model(), device="cpu", **settings)
        return made, stronghold.AdamW(trained(made), lr=1e-2)

    plain = model()
    in_memory = losses(plain, torch.optim.AdamW(trained(plain), lr=1e-2))
    whole, its = offloaded(window=4)
    expected = [losses(whole, its) for _ in range(2)]
    assert expected[0] == pytest.approx(in_memory, rel=1e-6) and expected[0][0] == in_memory[0]
    one, optimizer = offloaded(window=2, store=str(tmp_path / "store"))
    assert losses(one, optimizer) == expected[0]
    stronghold.checkpoint.save(tmp_path / "kept", one, optimizer)
    other, its = offloaded(window=1)
    stronghold.checkpoint.load(tmp_path / "kept", other, its)
    assert losses(one, optimizer) == expected[1] == losses(other, its)


@pytest.mark.parametrize(
    ("config", "shard", "store"),
    [(INT8, "20KB", "ram"), (FLOAT8, "5GB", "disk"), (quantization.IntxWeightOnlyConfig(torch.int4), "5GB", "ram")],
    ids=["int8", "float8", "intx"],
)
def test_what_is_quantised_in_the_files_is_what_transformers_reads(
    tmp_path: Path, config: Any, shard: str, store: str
) -> None:
    asked = transformers.TorchAoConfig(config() if callable(config) else config)
    write_quantised(tmp_path, asked, max_shard_size=shard)
    assert len([*(tmp_path / "quantised").glob("*.safetensors")]) == 1 or shard == "20KB"
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantised", device_map="cpu")
    place = {"store": str(tmp_path / "store")} if store == "disk" else {}
    model = stronghold.load(tmp_path / "quantised", device="cpu", window=2, **place)
    there, theirs = cells(model), cells(expected)
    assert len(there) >= 2 * 7 * 4
    assert there.keys() == theirs.keys()
    assert all(torch.equal(there[name], value) for name, value in theirs.items())
    found = []
    for one in (expected, model):
        adapted = with_adapters(one.requires_grad_(False), LORA).train()
        found.append(train(adapted, torch.optim.AdamW(trained(adapted), lr=1e-2, foreach=False)))
    assert found[1] == found[0]


def write_quantised(place: Path, config: Any, **more: Any) -> None:
    base().save_pretrained(place / "model")
    transformers.AutoModelForCausalLM.from_pretrained(
        place / "model", quantization_config=config, dtype=torch.bfloat16, device_map="cpu"
    ).save_pretrained(place / "quantised", **more)


def test_files_of_a_type_without_a_backward_pass_are_refused_before_they_are_read(tmp_path: Path) -> None:
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    write_quantised(tmp_path, transformers.TorchAoConfig(config))
    with pytest.raises(
        ValueError, match=r"_proj\.weight, a \S+Int8Tensor of torch.bfloat16.* on cpu has none: its out"
    ):
        stronghold.load(tmp_path / "quantised", device="cpu", window=1, store=str(tmp_path / "store"))
    assert not (tmp_path / "store").exists()


def test_int4_which_has_no_backward_pass_on_a_cpu_is_refused_by_name() -> None:
    """torchao keeps its int4 for CPUs among the prototypes; on one its kernel computes, and has no derivative."""
    prototypes = pytest.importorskip("torchao.prototype.quantization.int4.inference_workflow")
    int4 = prototypes.PrototypeInt4WeightOnlyConfig(group_size=32)
    assert torch.isfinite(torch.tensor(evaluated(quantised(int4)))).all()
    for first in ("offload", "adapters"):
        model = quantised(int4)
        with pytest.raises(
            ValueError,
            match=r"\.layers\.0\.self_attn\.q_proj\S*\.weight, a torchao\S+Int4\w*Tensor of torch.bfloat16, .* on cpu "
            r"has none: derivative for aten::_weight_int4pack_mm_for_cpu is not implemented",
        ):
            stronghold.offload(with_adapters(model, LORA) if first == "adapters" else model, device="cpu", window=1)


@pytest.mark.parametrize(
    ("config", "store", "streamed"),
    [
        (INT8, "ram", False),
        (INT8, "disk", True),
        (FLOAT8, "disk", False),
        (quantization.IntxWeightOnlyConfig(torch.int4), "ram", True),
    ],
    ids=["int8", "int8, streamed", "float8", "intx, streamed"],
)
def test_what_save_pretrained_writes_of_it_is_what_the_resident_model_writes(
    tmp_path: Path, config: Any, store: str, streamed: bool
) -> None:
    asked = transformers.TorchAoConfig(config() if callable(config) else config)
    write_quantised(tmp_path, asked)  # the resident model's own
    place = {"store": str(tmp_path / "store")} if store == "disk" else {}
    if streamed:
        model = stronghold.load(tmp_path / "quantised", device="cpu", window=1, **place)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", quantization_config=asked, dtype=torch.bfloat16, device_map="cpu"
        )
        model = stronghold.offload(model.requires_grad_(False), device="cpu", window=1, **place)
    evaluated(model)  # the slots have held other layers
    model.save_pretrained(tmp_path / "again")
    files = [tmp_path / folder / "model.safetensors" for folder in ("quantised", "again")]
    with safetensors.safe_open(files[0], "pt") as theirs, safetensors.safe_open(files[1], "pt") as ours:
        assert ours.metadata() == theirs.metadata()
    expected, found = (safetensors.torch.load_file(file) for file in files)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", device_map="cpu")
    assert len(cells(again)) >= 2 * 7 * 4
    assert evaluated(again) == evaluated(model)
    if streamed:  # transformers itself lets only eight bits train, and so would Trainer
        transformers.trainer_utils.validate_quantization_for_training(with_adapters(model, LORA))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    name = r"\(got model\.layers\.0\.self_attn\.q_proj\.weight, a "
    with pytest.raises(
        ValueError, match=rf"{name}torchao\S+Int8Tensor .*input in torch.bfloat16 on cpu has none: its out"
    ):
        stronghold.offload(quantised(quantization.Int8DynamicActivationInt8WeightConfig), device="cpu", window=1)
    with pytest.raises(
        ValueError, match=rf"{name}\S+Float8Tensor of torch.bfloat16, which with an input in torch.float32"
    ):
        stronghold.offload(quantised(FLOAT8), device="cpu", window=1, dtype=torch.float32)
    model = base()
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(Opaque(linear.weight.detach().to(torch.int8)), requires_grad=False)
    with pytest.raises(ValueError, match=rf"{name}\S+Opaque .*none: no kernel for aten\.\S+\); quantise to a type"):
        stronghold.offload(model, device="cpu", window=1)
    linear.weight = quantised().model.layers[0].self_attn.q_proj.weight
    linear.weight.qdata = linear.weight.qdata.t().contiguous().t()
    with pytest.raises(ValueError, match=rf"must be contiguous {name}\S+Int8Tensor, whose qdata of shape \(64, 64\)"):
        stronghold.offload(model, device="cpu", window=1)
    model = quantised()
    model.model.layers[1].mlp.up_proj.weight.requires_grad_(True)
    with pytest.raises(
        ValueError, match=r"cannot be trained \(got model\.layers\.1\.mlp\.up_proj\.weight with requires"
    ):
        stronghold.offload(model, device="cpu", window=1)
    with pytest.raises(ValueError, match=r"weights as Int8Tensor in model\.layers\.0\); use activations='recompute'"):
        stronghold.offload(quantised(), device="cpu", window=1, activations="keep")
    base().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"q_proj\.weight as BF16, the model's is a Int8Tensor"):
        stronghold.offload(quantised(), device="cpu", window=1, weights=tmp_path / "model")
    model = stronghold.offload(quantised(), device="cpu", activations="keep")  # all are resident: nothing moves
    assert evaluated(model) == evaluated(quantised())

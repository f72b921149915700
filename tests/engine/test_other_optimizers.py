"""Every optimizer, of whatever library, trains an offloaded model to the bits of the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import stronghold
from stronghold.device import CpuDevice
from stronghold.errors import BudgetError, OffloadedModelError
from tests.reference import CASES
from tests.small import Residual, numbers

STEPS = 4
PLAIN, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], list[dict[str, Any]]]] = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}, [PLAIN, FOREACH]),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}, [PLAIN]),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}, [PLAIN, FOREACH, FUSED]),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, [PLAIN, FOREACH, FUSED]),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}, [PLAIN, FOREACH, FUSED]),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}, [PLAIN, FOREACH]),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}, [PLAIN, FOREACH]),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}, [PLAIN, FOREACH]),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}, [PLAIN, FOREACH]),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}, [PLAIN, FOREACH]),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}, [PLAIN, FOREACH]),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, [PLAIN, FOREACH, FUSED]),
}
WAYS = [
    pytest.param(name, way, marks=() if way is ways[number % len(ways)] else pytest.mark.long)
    for number, (name, (_, _, ways)) in enumerate(OPTIMIZERS.items())
    for way in ways
]
WINDOWS = (1, 2, 4)


def places(folder: Path) -> list[tuple[int, str | Path]]:
    """Returns windows, each with a store."""
    return [(1, folder / "store"), (2, "ram"), (4, "ram")]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


def train(model: nn.Module, step: Callable[[], Any], batches: Sequence[torch.Tensor] = ()) -> list[float]:
    losses = []
    for batch in batches or numbers(STEPS):
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        step()
        losses.append(loss.item())
    return losses


def check(build: Callable[[list[nn.Parameter]], Any], tmp_path: Path, **settings: Any) -> None:
    """Trains the same model plainly and offloaded, in every place, and compares to the bit."""
    torch.manual_seed(0)
    base = Residual(layers=4).eval()
    plain = copy.deepcopy(base)
    expected = train(plain, build(list(plain.parameters())).step)
    assert len(set(expected)) == STEPS, "it does not train"
    for window, store in places(tmp_path):
        model = stronghold.offload(copy.deepcopy(base), window=window, store=store, device="cpu", **settings)
        assert train(model, build(list(model.parameters())).step) == expected, (window, store)
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, other), (window, store, name)


@pytest.mark.parametrize(
    ("name", "way"), WAYS, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_those_of_torch_in_every_implementation(name: str, way: dict[str, bool], tmp_path: Path) -> None:
    kind, settings, _ = OPTIMIZERS[name]
    check(lambda parameters: kind(parameters, **settings, **way), tmp_path)


def test_muon_for_the_matrices_beside_adamw_for_the_rest(tmp_path: Path) -> None:
    class Both:
        def __init__(self, parameters: list[nn.Parameter]) -> None:
            matrices = [p for p in parameters if p.ndim == 2]
            self.parts = [
                torch.optim.Muon(matrices, lr=0.01),
                torch.optim.AdamW([p for p in parameters if p.ndim != 2], lr=0.01, fused=True),
            ]

        def step(self) -> None:
            for part in self.parts:
                part.step()

    check(Both, tmp_path)


def test_what_torch_refuses_on_the_plain_model_it_refuses_here() -> None:
    """``capturable`` needs parameters on an accelerator."""
    model = stronghold.offload(Residual(), window=1, device="cpu")
    for one in (Residual(), model):
        optimizer = torch.optim.AdamW(one.parameters(), capturable=True)
        one(numbers(1)[0]).backward()
        with pytest.raises(AssertionError, match="capturable"):
            optimizer.step()


def test_a_closure_that_computes_within_the_step(tmp_path: Path) -> None:
    """LBFGS evaluates the model several times in one step, and writes between."""
    torch.manual_seed(0)
    base = Residual(layers=4).eval()
    batch = numbers(1)[0]

    def losses(model: nn.Module) -> list[float]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in range(3)]

    expected = losses(copy.deepcopy(base))
    for window, store in places(tmp_path):
        model = stronghold.offload(copy.deepcopy(base), window=window, store=store, device="cpu")
        assert losses(model) == expected


def test_the_adafactor_of_transformers(tmp_path: Path) -> None:
    check(lambda p: transformers.Adafactor(p, lr=0.01, relative_step=False, scale_parameter=False), tmp_path)


class ByPointer(torch.optim.Optimizer):
    """Writes as an extension in C does: through an address, which nothing in torch sees."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    descend(parameter)


def descend(parameter: nn.Parameter) -> None:
    """Takes a step of gradient descent by addresses alone."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = parameter.grad
        assert gradient is not None
        memory = torch.frombuffer(_bytes(parameter), dtype=parameter.dtype)
        version = parameter._version
        memory -= 0.1 * gradient.detach().reshape(-1)
        assert parameter._version == version


def _bytes(parameter: nn.Parameter) -> Any:
    import ctypes

    return (ctypes.c_char * parameter.nbytes).from_address(parameter.data_ptr())


def test_one_that_writes_through_pointers(tmp_path: Path) -> None:
    check(ByPointer, tmp_path)


class OneElement(ByPointer):
    """Writes a single element by its address, which no sample finds."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            write_one(parameter)


def write_one(parameter: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if parameter.numel() > 100:
            torch.frombuffer(_bytes(parameter), dtype=parameter.dtype)[1] += 1.0


def test_the_hook_on_its_step_tells_of_what_no_look_at_the_weights_would_find() -> None:
    check_in_memory(lambda parameters: OneElement(parameters).step)


def test_a_block_tells_of_what_no_look_at_the_weights_would_find() -> None:
    def build(parameters: list[nn.Parameter]) -> Callable[[], None]:
        def step() -> None:
            with stronghold.writing(parameters):
                for parameter in parameters:
                    write_one(parameter)

        return step

    check_in_memory(build)


def check_in_memory(build: Callable[[list[nn.Parameter]], Callable[[], Any]]) -> None:
    torch.manual_seed(0)
    base = Residual(layers=4).eval()
    plain = copy.deepcopy(base)
    expected = train(plain, build(list(plain.parameters())))
    for window in WINDOWS:
        model = stronghold.offload(copy.deepcopy(base), window=window, device="cpu")
        assert train(model, build(list(model.parameters()))) == expected, window


class Untold:
    """One that is no optimizer of torch's kind, and writes through pointers."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            descend(parameter)


def test_writes_that_nobody_tells_of_are_found(tmp_path: Path) -> None:
    check(Untold, tmp_path)


def test_an_operator_of_an_extension_may_write_what_it_is_given() -> None:
    library = torch.library.Library("stronghold_tests", "DEF")
    library.define("write_one(Tensor weight) -> ()")  # which declares no write

    def kernel(weight: torch.Tensor) -> None:
        write_one(weight)  # type: ignore[arg-type]

    library.impl("write_one", kernel, "CPU")

    def build(parameters: list[nn.Parameter]) -> Callable[[], None]:
        def step() -> None:
            with torch.no_grad():
                for parameter in parameters:
                    torch.ops.stronghold_tests.write_one(parameter)

        return step

    check_in_memory(build)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_root_parameter_on_the_device_keeps_what_a_pointer_wrote(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW updates the host's copy, and would upload it over a write that it did not see."""
    monkeypatch.setattr(CpuDevice, "is_host", False)
    model = stronghold.offload(Residual(), window=2, device="cpu", dtype=dtype)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-4)
    batches = [batch.to(dtype) for batch in numbers(2)]
    for batch in batches:
        train(model, optimizer.step, [batch])
        optimizer.wait()
        with torch._C.DisableTorchFunctionSubclass():
            torch.frombuffer(_bytes(model.out.weight), dtype=dtype).fill_(5.0)
    train(model, optimizer.step, batches[:1])
    assert (model.out.weight.float() - 5.0).abs().max() <= 0.05


class TestOtherLibraries:
    """Matrices large enough for states in eight bits."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(4))
            self.layers = nn.ModuleList(blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x.square().mean()

    def check(self, build: Callable[[list[nn.Parameter]], torch.optim.Optimizer], tmp_path: Path) -> None:
        torch.manual_seed(0)
        base = self.Wide()
        batches = list(torch.randn(STEPS, 8, 64).unbind())
        plain = copy.deepcopy(base)
        expected = train(plain, build(list(plain.parameters())).step, batches)
        for window, store in places(tmp_path):
            model = stronghold.offload(copy.deepcopy(base), window=window, store=store, device="cpu")
            assert train(model, build(list(model.parameters())).step, batches) == expected, (window, store)
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter, other), (window, store, name)

    @pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Lion8bit"])
    def test_bitsandbytes(self, name: str, tmp_path: Path) -> None:
        import bitsandbytes

        settings = {"min_8bit_size": 16} if name.endswith("8bit") else {}
        self.check(lambda parameters: getattr(bitsandbytes.optim, name)(parameters, lr=0.01, **settings), tmp_path)

    def test_torchao(self, tmp_path: Path) -> None:
        import torchao.optim

        self.check(lambda parameters: torchao.optim.AdamW8bit(parameters, lr=0.01), tmp_path)


class TestMasters:
    """A model that computes in bf16 has fp32 masters, which only our AdamW steps."""

    def offloaded(self, model: nn.Module, **settings: Any) -> nn.Module:
        return stronghold.offload(model, window=2, device="cpu", dtype=torch.bfloat16, **settings)

    def test_another_optimizer_is_refused_before_it_writes(self) -> None:
        case = CASES["llama"]
        model = self.offloaded(case.model())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model(**case.batches(1)[0]).loss.backward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(OffloadedModelError, match=r"fp32 masters.*torch\.optim\.adamw\.AdamW.*stronghold\.AdamW"):
            optimizer.step()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name

    @pytest.mark.parametrize("fused", [False, True])
    def test_a_model_that_was_bf16_before_has_none_and_trains_as_the_plain_one(self, fused: bool) -> None:
        case = CASES["llama"]
        base = case.model().to(torch.bfloat16).eval()

        def losses(model: nn.Module) -> list[float]:
            optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused), []
            for batch in case.batches(STEPS):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            return found

        plain = copy.deepcopy(base)
        expected = losses(plain)
        for window in (1, 2):
            model = stronghold.offload(copy.deepcopy(base), window=window, device="cpu")
            assert losses(model) == expected
            for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(parameter, other), name

    def test_a_write_by_a_pointer_becomes_the_master(self, tmp_path: Path) -> None:
        """The low bits of a weight that was written so would else be added to it: of a zero and a negative one, NaN."""
        for store in ("ram", tmp_path / "store"):
            torch.manual_seed(0)
            model = self.offloaded(Residual(layers=4), store=store)
            optimizer = stronghold.AdamW(model.parameters(), lr=0.01)
            batches = [batch.bfloat16() for batch in numbers(STEPS)]
            train(model, optimizer.step, batches)
            optimizer.wait()
            weight = model.layers[1].up.weight
            with torch._C.DisableTorchFunctionSubclass():
                torch.frombuffer(_bytes(weight), dtype=torch.bfloat16)[: weight.numel() // 2].zero_()
            train(model, optimizer.step, batches[:1])
            assert torch.isfinite(weight).all()
            assert weight.view(-1)[: weight.numel() // 2].abs().max() <= 0.0101


class TestReport:
    def test_it_counts_what_other_optimizers_hold(self) -> None:
        model = stronghold.offload(Residual(), window=1, device="cpu")
        before = stronghold.report(model)
        assert (before.others_host_bytes, before.other_optimizers) == (0, ())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        train(model, optimizer.step, numbers(1))
        held = sum(state[key].nbytes for state in optimizer.state.values() for key in state)
        after = stronghold.report(model)
        assert after.others_host_bytes == held > 0
        assert after.host_bytes >= before.host_bytes + held
        assert after.other_optimizers == ("torch.optim.adamw.AdamW",)
        assert "torch.optim.adamw.AdamW" in str(after)
        del optimizer
        assert stronghold.report(model).others_host_bytes == 0

    def test_a_budget_counts_it_too(self) -> None:
        probe = stronghold.offload(Residual(), window=1, device="cpu")
        held = stronghold.report(probe).host_bytes
        model = stronghold.offload(Residual(), window=1, device="cpu", host_memory=held + 20_000)
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(BudgetError, match=r"torch\.optim\.adamw\.AdamW.*host_memory"):
            train(model, optimizer.step, numbers(1))

"""Between two steps a model is an ordinary module: it generates, is evaluated, read, saved, loaded and written."""

from __future__ import annotations

import copy
import io
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stronghold import native
from stronghold.device import CpuDevice
from stronghold.engine.find_layers import find_layers
from tests.crossed import crossed
from tests.reference import CASES, Batch, Case, MasterAdamW, offloaded, ordinary

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
MEMORY = {True: "", False: "apart"}
STEPS = 3


@pytest.fixture(autouse=True, params=MEMORY, ids=MEMORY.get)
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets root parameters be the host's own memory, and copies as on a device that has memory of its own."""
    monkeypatch.setattr(CpuDevice, "is_host", request.param)


def some(names: str, *values: Any, together: int = 2) -> pytest.MarkDecorator:
    """Parametrizes a test by ``names`` and by both kinds of memory: some combinations each time, all with the long."""

    def name(value: Any) -> Any:
        known = {**MEMORY, **DTYPES} if isinstance(value, (bool, torch.dtype)) else {}
        return known.get(value, getattr(value, "__name__", None))

    combinations = crossed(MEMORY, *values, together=together)
    return pytest.mark.parametrize(f"_memory, {names}", combinations, indirect=["_memory"], ids=name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(before)


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every update take so long that whoever does not wait for it is too early."""
    adamw = native.adamw

    def slowly(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.005)
        adamw(*args, **kwargs)

    monkeypatch.setattr(native, "adamw", slowly)


Visit = Callable[[nn.Module, int], Any]
"""What is done with the model behind a step; what it returns is compared."""


def visited(
    model: nn.Module, optimizer: Any, batches: list[Batch], visit: Visit, block: int = 1
) -> tuple[list[float], list[Any]]:
    torch.manual_seed(5)
    losses, seen = [], []
    for step, batch in enumerate(batches):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        seen.append(visit(model, step))
        if isinstance(optimizer, MasterAdamW):
            modules = [model] if CpuDevice.is_host else [layer.module for layer in find_layers(model)]
            in_blocks = [p for module in modules for p in module.parameters()] if block > 1 else []
            optimizer.take_writes(block, in_blocks)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, seen


def plain(case: Case, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    if dtype == torch.float32:
        return ordinary(case)
    model = case.model()
    return model, MasterAdamW(model, dtype=dtype, lr=1e-3)


def compare(case: Case, dtype: torch.dtype, visit: Visit, block: int = 1, **settings: Any) -> None:
    """Trains with and without offloading, with ``visit`` behind each step, and compares losses and all that was seen.

    ``block`` is the number of neighbours whose bf16 weights count as written where one of them was.

    In bf16 the losses to the bit; in fp32, where the reference rounds otherwise than the engine's kernel, to rounding.
    Of what was seen, differences of nearly equal numbers are further apart in proportion, and no further in size.
    """
    batches = case.batches(STEPS)
    expected_losses, expected = visited(*plain(case, dtype), batches, visit, block)
    losses, seen = visited(*offloaded(case, dtype=dtype, **settings), batches, visit)
    exact = dtype == torch.bfloat16
    torch.testing.assert_close(losses, expected_losses, rtol=0.0 if exact else 1e-5, atol=0.0)
    torch.testing.assert_close(seen, expected, rtol=0.0 if exact else 1e-5, atol=1e-8 if exact else 1e-5)


@some("name, dtype", ["gpt2", "llama", "t5", "bart", "mixtral"], DTYPES, together=1)
def test_generation(name: str, dtype: torch.dtype) -> None:
    def visit(model: nn.Module, step: int) -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(step)
            prompt = CASES[name].batches(1, seed=step)[0]["input_ids"][:, :5]
            return model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=bool(step % 2))

    compare(CASES[name], dtype, visit, window=2)


@some("name, activations, dtype", ["gpt", "t5", "vit"], ["recompute", "keep"], DTYPES)
def test_evaluation(name: str, activations: str, dtype: torch.dtype) -> None:
    def visit(model: nn.Module, step: int) -> float:
        model.eval()
        with torch.no_grad():
            losses = [model(**batch).loss.item() for batch in CASES[name].batches(2, size=3, seed=step)]
        model.train()
        return sum(losses)

    compare(CASES[name], dtype, visit, window=1 + (dtype == torch.bfloat16), activations=activations)


@some("dtype", DTYPES, together=1)
def test_evaluation_with_gradients_enabled_and_never_used(dtype: torch.dtype) -> None:
    def visit(model: nn.Module, step: int) -> float:
        return model.eval()(**CASES["gpt"].batches(1, seed=step)[0]).loss.item() + model.train().training

    compare(CASES["gpt"], dtype, visit, window=2)


@some("dtype, update", DTYPES, ["deferred", "in_backward"])
@pytest.mark.usefixtures("slow_updates")
def test_a_state_dictionary_right_behind_a_step_has_the_new_values(dtype: torch.dtype, update: str) -> None:
    def visit(model: nn.Module, step: int) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in model.state_dict().items()}

    compare(CASES["llama"], dtype, visit, window=2, adamw={"update": update})


def read_by_saving(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return dict(torch.load(file))


READS: dict[str, Callable[[nn.Module], Any]] = {
    "save": read_by_saving,
    "deepcopy": lambda m: copy.deepcopy(m.state_dict()),
    "vector": lambda m: torch.nn.utils.parameters_to_vector(m.parameters()).detach(),
    "norm": lambda m: [p.norm().item() for p in m.parameters()],
    "list": lambda m: [p.flatten()[:3].tolist() for p in m.parameters()],
    "item": lambda m: [p.detach().flatten()[0].item() for p in m.parameters()],
    "foreach": lambda m: [t.item() for t in torch._foreach_norm([p.detach() for p in m.parameters()])],
    "index": lambda m: [p[0].detach().clone() for p in m.parameters()],
    "data": lambda m: [p.data.clone() for p in m.parameters()],
    "print": lambda m: [zlib.crc32(repr(p).encode()) for p in m.parameters()],
    "numpy": lambda m: [p.detach().float().numpy().copy() for p in m.parameters()],
    "gradients": lambda m: [p.grad.clone() for p in m.parameters() if p.grad is not None],
}


@some("way", READS, together=1)
@pytest.mark.usefixtures("slow_updates")
def test_reading(way: str) -> None:
    compare(CASES["gpt"], torch.bfloat16, lambda model, step: READS[way](model), window=2)


@some("name, window, dtype", ["gpt", "bert"], [1, 2, 4], DTYPES)
@pytest.mark.usefixtures("slow_updates")
def test_loading_a_state_dictionary_between_steps(name: str, window: int, dtype: torch.dtype) -> None:
    case = CASES[name]

    def visit(model: nn.Module, step: int) -> None:
        if step == 1:
            model.load_state_dict(case.model(seed=3).state_dict())

    compare(case, dtype, visit, window=window)


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.75)


def through_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.75)


def by_setting_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.75


def by_vector(model: nn.Module) -> None:
    vector = torch.nn.utils.parameters_to_vector(model.parameters())
    torch.nn.utils.vector_to_parameters(vector.detach() * 0.75, model.parameters())


def by_foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.75)


def one_element(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] = 0.125


def by_initialising(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02, generator=generator)


def through_the_state_dictionary(model: nn.Module) -> None:
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.mul_(0.75)


def through_a_view(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[:2].mul_(0.5)


def through_detached(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.detach().clamp_(-0.01, 0.01)


def as_an_output(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            torch.mul(parameter.detach().clone(), 0.75, out=parameter)


WRITES = [
    in_place,
    through_data,
    by_setting_data,
    by_vector,
    by_foreach,
    one_element,
    by_initialising,
    through_the_state_dictionary,
    through_a_view,
    through_detached,
    as_an_output,
]


@some("write, window, dtype", WRITES, [1, 4], DTYPES)
@pytest.mark.usefixtures("slow_updates")
def test_writing(write: Callable[[nn.Module], None], window: int, dtype: torch.dtype) -> None:
    """Layers and root parameters, on steps 1 and 2; the engine must notice, whatever way the values went.

    What goes through the parameter counts element by element; what goes by an alias of the host's memory in bf16 counts
    by blocks of 64 (:mod:`stronghold.unit.masters`).
    """

    def visit(model: nn.Module, step: int) -> list[Tensor]:
        if step in (1, 2):
            write(model)
        return [parameter.detach().clone() for parameter in model.parameters()]

    compare(CASES["gpt"], dtype, visit, block=64 if write in (through_a_view, through_detached) else 1, window=window)


def test_pruning_and_loading_what_is_there_keeps_bf16_finite() -> None:
    """Found by random sequences: the zero that ``p.data`` wrote unseen kept its old remainder and became NaN."""
    case = CASES["llama"]
    model, optimizer = offloaded(case, window=2, dtype=torch.bfloat16)
    for batch in case.batches(2):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.mul_(torch.rand(parameter.shape) > 0.5)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    model(**case.batches(1)[0]).loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), name

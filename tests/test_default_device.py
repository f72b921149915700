"""``torch.set_default_device`` is for the user's own tensors: what lies on the host stays there."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stronghold
from tests.reference import differences, snapshot
from tests.small import Residual, numbers

LIBRARY = Path(stronghold.__file__).parent
ELSEWHERE = ("lab", "engine/planning")
"""The lab makes the user's tensors; what is planned has no memory, and is as if on the default device."""
MADE = {
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "as_tensor",
    "empty_strided",
    "rand",
    "randn",
    "linspace",
    "eye",
}
PLACES: list[dict[str, Any]] = [
    {"window": 1},
    {"window": 2, "store": "disk"},
    {"window": 2, "resident": 1, "activations": "host"},
    {"window": 2, "dtype": torch.bfloat16, "store": "disk"},
    {},
]


def trained(folder: Path, settings: dict[str, Any], adamw: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Accumulates and clips where the optimizer has no settings, and loads what it has saved."""
    settings = {**settings, **({"store": str(folder / "store")} if "store" in settings else {})}
    torch.manual_seed(0)
    with torch.device("cpu"):
        model: nn.Module = Residual()
        batches = [batch.to(settings.get("dtype")) for batch in numbers(4)]
    model = stronghold.offload(model, device="cpu", **settings)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-2, **adamw)
    torch.manual_seed(7)
    losses = []
    for batch in batches:
        for _ in range(1 if adamw else 2):
            loss = model(batch)
            loss.backward()
            losses.append(loss.item())
        if not adamw:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    stronghold.checkpoint.save(folder / "saved", model, optimizer)
    stronghold.checkpoint.load(folder / "saved", model, optimizer)
    return losses, snapshot(model, optimizer)


@pytest.mark.parametrize("adamw", [{}, {"update": "in_backward", "states": "8bit"}], ids=str)
@pytest.mark.parametrize("settings", PLACES, ids=str)
def test_a_default_device_changes_nothing(tmp_path: Path, settings: dict[str, Any], adamw: dict[str, Any]) -> None:
    """It took sums of squares, the states' steps and samples of weights with it, onto the GPU or into an error."""
    losses, state = trained(tmp_path / "without", settings, adamw)
    torch.set_default_device("meta")  # another device, which every machine has
    try:
        again, other = trained(tmp_path / "with", settings, adamw)
    finally:
        torch.set_default_device(None)
    assert again == losses
    assert differences(other, state) == []


def test_what_is_planned_is_planned_without_one() -> None:
    """The planner's tensors without memory were on it, and those of the model's on the CPU."""
    plans = []
    for device in (None, "meta"):
        with torch.device("cpu"):
            model, batch = Residual(), numbers(1)[0]
        torch.set_default_device(device)
        try:
            offloaded = stronghold.offload(model, device="cpu", inputs=(batch,))
        finally:
            torch.set_default_device(None)
        planned = stronghold.report(offloaded).planned
        assert planned is not None
        plans.append((planned.chosen, planned.device_bytes))
    assert plans[1] == plans[0]


def test_every_tensor_that_is_made_names_its_device() -> None:
    found = []
    for path in LIBRARY.rglob("*.py"):
        if path.relative_to(LIBRARY).as_posix().startswith(ELSEWHERE):
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        made = [call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in MADE}]
        found += [f"{path}:{one.lineno}" for one in made if all(word.arg != "device" for word in one.keywords)]
    assert found == []

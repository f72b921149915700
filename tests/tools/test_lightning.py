"""Lightning's Trainer trains an offloaded model as it trains any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import stronghold
from stronghold.errors import OffloadedModelError
from tests.reference import CASES, Batch, differences, snapshot

CASE = CASES["llama"]
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Module(lightning.LightningModule):
    """The ordinary one: the model, its loss and its optimizer."""

    def __init__(self, model: nn.Module, adamw: Any, *, manual: bool = False, **settings: Any) -> None:
        super().__init__()
        self.model = model
        self.optimizer = adamw(model.parameters(), lr=3e-3, weight_decay=0.1, **settings)
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def configure_optimizers(self) -> Any:
        scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: Batch, number: int) -> Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            self.manual_backward(loss)
            if number % 2:
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
        return loss


class Copies(TorchDispatchMode):
    """Notes the copies between devices that are made in it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.made.append(str(func))
        return func(*args, **(kwargs or {}))


def offloaded(**settings: Any) -> nn.Module:
    return stronghold.offload(CASE.model(), device="cpu", **settings)


def fit(module: Module, directory: Path, **settings: Any) -> lightning.Trainer:
    samples = [{key: value[0] for key, value in batch.items()} for batch in CASE.batches(24, size=1)]
    trainer = lightning.Trainer(default_root_dir=directory, **({"max_epochs": 1, **QUIET} | settings))
    torch.manual_seed(7)
    checkpoint = settings.pop("resume", None)
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=2), ckpt_path=checkpoint)  # type: ignore
    return trainer


def assert_alike(module: Module, expected: Module) -> None:
    assert len(set(module.losses)) == 12
    torch.testing.assert_close(module.losses, expected.losses, rtol=1e-5, atol=1e-6)
    for (name, parameter), other in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.dist(parameter, other) <= 1e-4 * other.norm(), name


@pytest.mark.parametrize("window", [1, 2, "auto"])
def test_it_trains_an_offloaded_model(tmp_path: Path, window: int | str) -> None:
    settings = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "enable_checkpointing": False}
    module = Module(offloaded(window=window), stronghold.AdamW)
    fit(module, tmp_path, **settings)
    expected = Module(CASE.model(), torch.optim.AdamW)
    fit(expected, tmp_path, **settings)
    assert_alike(module, expected)


def test_manual_optimization(tmp_path: Path) -> None:
    module = Module(offloaded(window=2), stronghold.AdamW, manual=True)
    fit(module, tmp_path, enable_checkpointing=False)
    expected = Module(CASE.model(), torch.optim.AdamW, manual=True)
    fit(expected, tmp_path, enable_checkpointing=False)
    assert_alike(module, expected)


def test_in_backward(tmp_path: Path) -> None:
    module = Module(offloaded(window=2), stronghold.AdamW, update="in_backward")
    fit(module, tmp_path, enable_checkpointing=False)
    expected = Module(CASE.model(), torch.optim.AdamW)
    fit(expected, tmp_path, enable_checkpointing=False)
    assert_alike(module, expected)
    with pytest.raises(OffloadedModelError, match="gradients cannot be scaled"):
        fit(module, tmp_path, enable_checkpointing=False, gradient_clip_val=1e-3)


def test_its_checkpoint_holds_everything_in_fp32_and_in_bf16_says_what_it_lost(tmp_path: Path) -> None:
    module = Module(offloaded(window=2), stronghold.AdamW)
    fit(module, tmp_path).save_checkpoint(tmp_path / "kept.ckpt")
    other = Module(offloaded(window=1), stronghold.AdamW)
    saved = torch.load(tmp_path / "kept.ckpt", weights_only=False)
    other.load_state_dict(saved["state_dict"])
    other.optimizer.load_state_dict(saved["optimizer_states"][0])
    assert differences(snapshot(other.model, other.optimizer), snapshot(module.model, module.optimizer)) == []

    module = Module(offloaded(window=2, dtype=torch.bfloat16), stronghold.AdamW)
    trainer = fit(module, tmp_path, enable_checkpointing=False)
    with pytest.warns(RuntimeWarning, match=r"goes on from rounded weights.*checkpoint\.save"):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


def test_half_precision_of_its_own_is_refused(tmp_path: Path) -> None:
    module = Module(offloaded(window=2), stronghold.AdamW)
    with pytest.raises(OffloadedModelError, match=r"stays on cpu with dtype torch\.float32 .*torch\.bfloat16"):
        fit(module, tmp_path, precision="bf16-true", enable_checkpointing=False)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_fits_one_after_the_other(tmp_path: Path, states: str) -> None:
    """At the beginning of each and at its end Lightning moves what the optimizer's states hold."""
    module = Module(offloaded(window=2), stronghold.AdamW, states=states)
    for _ in range(2):
        fit(module, tmp_path, enable_checkpointing=False)
    expected = Module(CASE.model(), torch.optim.AdamW)
    for _ in range(2):
        fit(expected, tmp_path, enable_checkpointing=False)
    assert len(module.losses) == 24
    tolerance = 1e-5 if states == "fp32" else 1e-2
    torch.testing.assert_close(module.losses, expected.losses, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_its_moves_of_states_leave_them_where_they_are(tmp_path: Path, states: str) -> None:
    module = Module(offloaded(window=2), stronghold.AdamW, states=states)
    fit(module, tmp_path, enable_checkpointing=False)
    before = {parameter: dict(state.items()) for parameter, state in module.optimizer.state.items()}
    assert before
    with Copies() as copies:
        _optimizers_to_device([module.optimizer], torch.device("meta"))  # any but the states' own
    assert copies.made == []
    for parameter, state in module.optimizer.state.items():
        assert all(value is before[parameter][key] for key, value in state.items())
    fit(module, tmp_path, enable_checkpointing=False)

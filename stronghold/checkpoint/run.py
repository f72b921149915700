"""The checkpoints of one training run, in its folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from stronghold.checkpoint.folder import newest, prune, remove, step_path, steps_in
from stronghold.checkpoint.loading import load
from stronghold.checkpoint.plain import from_plain
from stronghold.checkpoint.saving import save
from stronghold.checkpoint.units import engine_for
from stronghold.checkpoint_files.manifest import Manifest
from stronghold.config import TrainSettings
from stronghold.data.batches import Batches
from stronghold.errors import CheckpointError
from stronghold.evaluation.records import read_records
from stronghold.evaluation.runs import LOG_NAME

FOLDER = "checkpoints"
SAME = (
    *("method", "path", "layers", "hidden", "heads", "vocabulary", "dropout", "source", "tokenizer", "held_out"),
    *("lr", "warmup_steps", "betas", "eps", "weight_decay", "max_grad_norm", "dtype", "batch", "sequence", "seed"),
)
"""The settings that a run goes on with: what is learned, from what and in which order. Where and how may change."""


class RunCheckpoints:
    """Saves a run's checkpoints and goes on from the newest intact one.

    Whatever can be refused is refused when it is made. ``say`` shows a line to the user. Raises ValueError for a folder
    that cannot be used as ``settings`` say, and CheckpointError where it holds checkpoints and none is intact.
    """

    def __init__(self, settings: TrainSettings, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._folder = Path(settings.out) / FOLDER
        self._manifest: Manifest | None = None
        self._skipped: dict[Path, str] = {}
        self._data: dict[str, int] | None = None
        self.step = 0
        """After which step the run goes on."""
        if settings.resume:
            self._find(say)
        elif steps_in(self._folder):
            raise ValueError(
                f"a run's folder must not hold another run (got {settings.out!r}, which has checkpoints); resume it "
                "(--resume), pass another folder, or remove that one"
            )

    def begin(self, model: nn.Module, optimizer: Any, scheduler: Any, batches: Batches) -> None:
        """Takes what the run trains, and puts it where the checkpoint found it, if there is one.

        Raises ValueError where the data are others, and what :func:`load` raises.
        """
        every, found = self._settings.checkpoint_every, self._manifest
        if every is None and found is None:
            return
        engine_for(model, optimizer)
        self._trained = model, optimizer, scheduler
        self._data = batches.fingerprint()
        if found is None:
            return
        saved = from_plain(found.extra)["data"]
        if saved != self._data:
            raise ValueError(
                f"a run goes on with the data it began with (got {self._data['tokens']:,} tokens with CRC-32C "
                f"{self._data['crc32c']:08x}, {saved['tokens']:,} with {saved['crc32c']:08x} in {found.directory}); "
                "restore the text, or begin a run in another folder"
            )
        load(found.directory, model, optimizer, scheduler=scheduler, verify=False)  # every byte was when it was found

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether a checkpoint belongs behind ``step``; behind the ``last`` one always."""
        every = self._settings.checkpoint_every
        return every is not None and (last or step % every == 0)

    def save(self, step: int) -> Path:
        """Saves the checkpoint of ``step`` and then removes those that are too many. Raises what :func:`save` does."""
        model, optimizer, scheduler = self._trained
        path = step_path(self._folder, step)
        if path.exists():  # a damaged one, for the run would have gone on from it
            remove(path)
        extra = {"position": step, "settings": self._settings.flat(), "data": self._data}
        save(path, model, optimizer, scheduler=scheduler, extra=extra)
        self._skipped.pop(path, None)
        prune(self._folder, step, self._settings.keep_checkpoints, self._skipped)
        return path

    def _find(self, say: Callable[[str], None]) -> None:
        self._manifest, self._skipped = newest(self._folder)
        for path, reason in self._skipped.items():
            say(f"skipped    {path}: {reason}")
        if self._manifest is None:
            if self._skipped:
                raise CheckpointError(
                    f"a run goes on from an intact checkpoint (got {len(self._skipped)} in {self._folder}, all "
                    f"damaged: {'; '.join(self._skipped.values())}); restore one, or begin a run in another folder"
                )
            self._check_log()
            say(f"resume     no checkpoint in {self._folder} yet: beginning with step 1")
            return
        extra = from_plain(self._manifest.extra)
        if not isinstance(extra, dict) or not {"position", "settings", "data"} <= extra.keys():
            raise CheckpointError(
                f"a run goes on from a checkpoint of `stronghold train` (got {self._manifest.directory}, which another "
                "program saved); load it with stronghold.checkpoint.load"
            )
        here, there = self._settings.flat(), extra["settings"]
        if others := [name for name in SAME if name in there and here[name] != there[name]]:
            listed = ", ".join(f"{name}={here[name]!r}, which was {there[name]!r}" for name in others)
            raise ValueError(
                f"a run goes on with the settings it began with (got {listed}, in {self._manifest.directory}); "
                "pass the same, or begin a run in another folder"
            )
        self.step = extra["position"]
        say(f"resume     from {self._manifest.directory}, after step {self.step}")

    def _check_log(self) -> None:
        """Refuses to begin anew over a run that was complete, or never kept checkpoints."""
        path = Path(self._settings.out) / LOG_NAME
        records = read_records(path).records if path.exists() else ()
        events = [record.get("event") for record in records]
        kept = any(r.get("event") == "start" and r["settings"].get("checkpoint_every") is not None for r in records)
        if "end" in events or ("step" in events and not kept):
            raise ValueError(
                f"a run goes on from a checkpoint (got {self._settings.out!r}, which has a {LOG_NAME} and no "
                "checkpoint, so that its run would be overwritten); pass another folder, or remove that one"
            )

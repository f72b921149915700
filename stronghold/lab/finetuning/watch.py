"""What a run shows, logs and keeps while the trainer trains: a callback of transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from stronghold.lab.finetuning.checkpoints import prune, seal
from stronghold.lab.finetuning.settings import FinetuneSettings
from stronghold.lab.records.json_lines import Record
from stronghold.lab.records.progress import StepDisplay
from stronghold.lab.records.runlog import RunLog
from stronghold.lab.stops import Stop
from stronghold.lab.training import of_report
from stronghold.reports import Report


class Watch(TrainerCallback):
    """Writes each step's record into ``log`` and onto ``console``, and ends the run where ``stop`` is asked for.

    A checkpoint that Trainer has written is sealed, and those that are too many are removed; where the run is stopped
    one is written. Those that are known to be ``damaged`` do not count. ``report`` says what the model takes, ``begin``
    is told how many steps there will be, before the first.
    """

    def __init__(
        self,
        settings: FinetuneSettings,
        *,
        data: int,
        damaged: Collection[Path],
        console: Console,
        log: RunLog,
        stop: Stop,
        report: Callable[[], Report],
        begin: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._data = data
        self._damaged = set(damaged)
        self._left = set[Path]()
        self._console = console
        self._log = log
        self._stop = stop
        self._report = report
        self._begin = begin
        self._display: StepDisplay | None = None
        self._since = 0.0
        self._tokens = 0
        self._samples = 0
        """Of an epoch."""
        self.steps = log.steps
        self.evaluations: list[Record] = []
        self.done = 0
        self.total = 0
        """The steps that there are to be, once training has begun."""
        self.saved: Path | None = None
        """The newest checkpoint of this run."""

    def close(self) -> None:
        """Ends what is shown."""
        if self._display is not None:
            self._display.__exit__()
            self._display = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Called when Trainer knows how many steps there are, and has loaded what it goes on from.

        That has the intervals of the run that wrote it, which may be others than those of this one.
        """
        state.compute_steps(args, state.max_steps)
        self._samples = len(more["train_dataloader"].dataset)
        self.done, self.total = state.global_step, state.max_steps
        self._begin(state.max_steps)
        self._display = StepDisplay(self._console, state.max_steps).__enter__()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called before a step's first forward pass."""
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when a step's update is under way.

        An evaluation that is due is done first, for a run that goes on would not do it: schedulers follow some.
        """
        self.done = state.global_step
        if self._stop.asked:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Called with a step's loss, and with that of an evaluation."""
        logs = logs or {}
        if "eval_loss" in logs:
            found = {"step": state.global_step, "loss": logs["eval_loss"], "eval_s": logs["eval_runtime"]}
            self.evaluations.append(found)
            self._log.evaluation(found)
            self._console.print(
                f"evaluation behind step {found['step']}  loss {found['loss']:.4f}", soft_wrap=True, highlight=False
            )
        elif "loss" in logs:
            self._step(state.global_step, logs)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called when Trainer, and KeepEverything before this, have written a checkpoint."""
        begin = time.perf_counter()
        path = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        self._log.sync()  # first: the records of all its steps are there whenever a checkpoint is
        seal(path, step=state.global_step, learned=self._settings.learned(), data=self._data)
        self._damaged.discard(path)
        left = prune(args.output_dir, state.global_step, self._settings.keep_checkpoints, self._damaged)
        for one in left.keys() - self._left:
            self._console.print(
                f"note       {one} cannot be removed: {left[one]}; remove it where that can be done", soft_wrap=True
            )
        self._left |= left.keys()
        self.saved = path
        self._log.checkpoint({"step": state.global_step, "path": str(path), "save_s": time.perf_counter() - begin})

    def _step(self, step: int, logs: dict[str, Any]) -> None:
        iteration_s = time.perf_counter() - self._since
        tokens, self._tokens = logs["num_tokens"] - self._tokens, logs["num_tokens"]
        report = self._report()
        record: Record = {
            "step": step,
            "loss": logs["loss"],
            "lr": logs["learning_rate"],
            "grad_norm": logs.get("grad_norm"),
            "batch": self._samples_of(step),
            "tokens": tokens,
            "iteration_s": iteration_s,
            "tokens_per_s": tokens / iteration_s,
            **of_report(report),
        }
        self.steps.append(record)
        self._log.step(record)
        if self._display is not None:
            self._display.step(record)

    def _samples_of(self, step: int) -> int:
        """Returns how many samples a step has: the last one of an epoch has those that are left."""
        most = self._settings.batch * self._settings.accumulate
        steps = -(-self._samples // most)
        return min(most, self._samples - (step - 1) % steps * most)

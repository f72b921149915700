"""The checkpoints of one training run, in its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from stronghold.checkpoint.folder import make_way, newest, prune, step_path, steps_in
from stronghold.checkpoint.in_place import check_space_beside
from stronghold.checkpoint.loading import load
from stronghold.checkpoint.plain import from_plain
from stronghold.checkpoint.saving import save
from stronghold.checkpoint.unit_tensors import engine_for
from stronghold.errors import CheckpointError, StrongholdError
from stronghold.formats.lock import locked_to_read
from stronghold.formats.manifest import NAME, Manifest, read_manifest
from stronghold.formats.reader import verify
from stronghold.lab.data.batches import Batches
from stronghold.lab.data.tokens import Tokenizer
from stronghold.lab.real_paths import as_named, real_paths
from stronghold.lab.records.runlog import check_begins_anew, to_go_on
from stronghold.lab.settings import TrainSettings, micro_batches_of
from stronghold.settings import without_place
from stronghold.store import forget
from stronghold.unit import ONE_PROCESS, ProcessGroup, from_rank0
from stronghold.weights import Weights

PLACES = ("path", "source", "out")
"""The settings that are paths of what a run reads, and of its folder: the same where they lead to the same."""
SAME = (
    *("method", "path", "layers", "hidden", "heads", "vocabulary", "dropout", "source", "held_out"),
    *(
        "lr",
        "warmup_steps",
        "decay_steps",
        "betas",
        "eps",
        "weight_decay",
        "max_grad_norm",
        "dtype",
        "batch",
        "micro_batch",  # each has dropout of its own, and sums of its own
        "sequence",
        "seed",
        "compile",  # compiled layers round in their own way
    ),
)
"""The settings that a run goes on with: what is learned, from what and in which order. Where and how may change."""


class RunCheckpoints:
    """Saves a run's checkpoints and goes on from the newest intact one.

    Whatever can be refused is refused when it is made; of ``processes``, which all make one, the first looks. ``say``
    shows a line to the user. Raises ValueError for a folder that cannot be used as ``settings`` say, and
    CheckpointError where it holds checkpoints and none is intact.
    """

    def __init__(
        self, settings: TrainSettings, say: Callable[[str], None], processes: ProcessGroup = ONE_PROCESS
    ) -> None:
        self._settings = settings
        self._say = say
        self._processes = processes
        self._folder = Path(settings.checkpoints_folder)
        self._manifest: Manifest | None = None
        self._skipped: dict[Path, str] = {}
        self._left = set[Path]()
        """What could not be removed, and was told."""
        self._data: dict[str, Any] | None = None
        self._superseded: Manifest | None = None
        """What the store has kept of this run, where it goes on from another."""
        self._store = Path(settings.offload.directories[0]) if settings.keep_store else None
        """Where the run stays when it ends."""
        self.step = 0
        """After which step the run goes on."""
        found = from_rank0(self._processes, lambda: self._look(say))
        self.step, self._manifest, self._skipped, self._superseded = found
        self._settings = settings.begun(None if self._manifest is None else _settings_of(self._manifest))
        self._newest = step_path(self._folder, self.step)
        """What this run would go on from, if it is there."""

    @property
    def settings(self) -> TrainSettings:
        """The run's settings, with the schedule that it began with."""
        return self._settings

    def _look(self, say: Callable[[str], None]) -> tuple[int, Manifest | None, dict[Path, str], Manifest | None]:
        settings = self._settings
        if settings.resume:
            self._find(say)
        elif steps_in(self._folder):
            raise ValueError(
                f"a run's folder must not hold another run (got {settings.out!r}, which has checkpoints); resume it "
                "(--resume), pass another folder, or remove that one"
            )
        elif self._store is not None and (self._store / NAME).exists():
            raise ValueError(
                f"a store's folder must not hold another run (got {str(self._store)!r}, which keeps one); resume it "
                "(--resume, with its --out), pass another folder, or remove that one"
            )
        return self.step, self._manifest, self._skipped, self._superseded

    @property
    def _in_use(self) -> bool:
        """Whether the run goes on from a checkpoint, or leaves one."""
        return self._settings.checkpoint_every is not None or self._store is not None or self._manifest is not None

    def open(self, weights: Weights | None, batches: Batches, tokenizer: Tokenizer) -> Weights | None:
        """Returns what gives the model its values: ``weights``, or the store's directory where the run is kept there.

        A run that the store has kept, and that another checkpoint is chosen over, is one no longer. Raises ValueError
        where the data or the tokenizer are others.
        """
        found = self._manifest
        if not self._in_use:
            return weights
        self._data = {**batches.fingerprint(), "tokenizer": tokenizer.fingerprint}
        if found is None:
            return weights
        saved = self._data | from_plain(found.extra)["data"]  # of earlier versions it does not name the tokenizer
        if saved["tokenizer"] != tokenizer.fingerprint:
            raise ValueError(
                f"a run goes on with the tokenizer it began with (got {tokenizer.name!r}, {tokenizer.fingerprint}; "
                f"{saved['tokenizer']} in {found.directory}); pass that one, or begin a run in another folder"
            )
        if saved != self._data:
            raise ValueError(
                f"a run goes on with the data it began with (got {self._data['tokens']:,} tokens with CRC-32C "
                f"{self._data['crc32c']:08x}, {saved['tokens']:,} with {saved['crc32c']:08x} in {found.directory}); "
                "restore the text and the tokenizer, or begin a run in another folder"
            )
        if found.directory == self._store:
            return str(self._store)
        kept = self._superseded
        if kept is not None and self._data | from_plain(kept.extra)["data"] == self._data:
            forget(kept.directory)
        return weights

    def begin(self, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        """Takes what the run trains, and puts it where the checkpoint found it, if there is one.

        Raises what :func:`load` raises, and StoreError where the store has no room to keep the run when it ends.
        """
        if not self._in_use:
            return
        engine_for(model, optimizer)
        self._trained = model, optimizer, scheduler
        if (found := self._manifest) is not None:
            load(found.directory, model, optimizer, scheduler=scheduler, verify=False)  # every byte was when found
        if self._store is not None:
            check_space_beside(model, optimizer)

    def due(self, step: int, *, last: bool = False) -> bool:
        """Whether a checkpoint belongs behind ``step``; behind the ``last`` one always."""
        every = self._settings.checkpoint_every
        return every is not None and (last or step % every == 0)

    def save(self, step: int) -> Path:
        """Saves the checkpoint of ``step`` and then removes those that are too many. Raises what :func:`save` does.

        Before it raises an OSError, of a full disk say, it says which checkpoint the run goes on from.
        """
        path = step_path(self._folder, step)
        # A damaged one, for the run would have gone on from it, or a stray file. One process looks: it may be gone for
        # the next.
        from_rank0(self._processes, lambda: make_way(path) if path.exists() else None)
        try:
            self._save(path, step)
        except OSError:
            if self._newest.exists():
                self._say(f"kept       {self._newest}; {to_go_on(self._settings.out)}")
            raise
        self._newest = path
        self._skipped.pop(path, None)
        keep = self._settings.keep_checkpoints
        left = from_rank0(self._processes, lambda: prune(self._folder, step, keep, self._skipped))
        for one in left.keys() - self._left:
            self._say(f"note       {one} cannot be removed: {left[one]}; remove it where that can be done")
        self._left |= left.keys()
        return path

    def keep(self, step: int) -> Path | None:
        """Makes the store's directory a checkpoint of ``step``, if it is to stay; returns it."""
        if self._store is not None:
            self._save(self._store, step)
        return self._store

    def _save(self, path: Path, step: int) -> None:
        model, optimizer, scheduler = self._trained
        settings = self._settings.flat()
        places = real_paths(settings, PLACES)
        extra = {"position": step, "settings": settings, "data": self._data, "places": places}
        save(path, model, optimizer, scheduler=scheduler, extra=extra)

    def _find(self, say: Callable[[str], None]) -> None:
        self._manifest, self._skipped = newest(self._folder)
        if self._store is not None and (self._store / NAME).exists():
            self._consider(self._store)
        for path, reason in self._skipped.items():
            say(f"skipped    {path}: {reason}")
        if self._manifest is None:
            if self._skipped:
                raise CheckpointError(
                    f"a run goes on from an intact checkpoint (got {len(self._skipped)} in {self._folder}, all "
                    f"damaged: {'; '.join(self._skipped.values())}); restore one, or begin a run in another folder"
                )
            check_begins_anew(self._settings.out)
            say(f"resume     no checkpoint in {self._folder} yet: beginning with step 1")
            return
        extra = from_plain(self._manifest.extra)
        if not isinstance(extra, dict) or not {"position", "settings", "data"} <= extra.keys():
            raise CheckpointError(
                f"a run goes on from a checkpoint of `stronghold train` (got {self._manifest.directory}, which another "
                "program saved); load it with stronghold.checkpoint.load"
            )
        begun = self._settings.begun(extra["settings"])
        now, before = begun.flat(), extra["settings"]
        if listed := _others(_learned(now), _learned(as_named(now, before, extra.get("places", {}), PLACES))):
            raise ValueError(
                f"a run goes on with the settings it began with (got {listed}, in {self._manifest.directory}); "
                "pass the same, or begin a run in another folder"
            )
        if listed := _others(_places(now), _places(before)):
            say(f"note       {listed}: from here on sums may round, and dropout draws, in another way")
        self.step = extra["position"]
        if (decay_steps := begun.optimizer.decay_steps or 0) < begun.steps:
            say(
                f"schedule   of the {decay_steps} steps that the run began with; from there to step {begun.steps} a "
                "tenth of the rate"
            )
        say(f"resume     from {self._manifest.directory}, after step {self.step}")
        if self._manifest.directory == self._store and begun.checkpoint_every is None:
            say(
                f"note       {self._store} is no checkpoint any more once its first layer is updated, until the run "
                "ends: one that is killed before has none; pass --checkpoint-every N to keep others"
            )

    def _consider(self, store: Path) -> None:
        """Chooses the run that the store has kept, unless a newer one is chosen or it is damaged."""
        try:
            with locked_to_read(store):
                kept = read_manifest(store)
                step = _position(kept)
                self._superseded = kept if self._is_this_run(kept) else None
                if self._manifest is not None and step < _position(self._manifest):
                    raise CheckpointError(f"it is of step {step}, and another of step {_position(self._manifest)}")
                verify(kept)
        except (StrongholdError, OSError) as error:
            self._skipped[store] = str(error)
        else:
            self._manifest, self._superseded = kept, None

    def _is_this_run(self, kept: Manifest) -> bool:
        extra = from_plain(kept.extra)
        there = extra.get("settings", {}) if isinstance(extra, dict) else {}
        now = self._settings.begun(there or None).flat()
        there = as_named(now, there, extra.get("places", {}) if there else {}, PLACES)
        return there.get("out") == self._settings.out and not _others(_learned(now), _learned(there))


def _others(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Returns which settings, of those that both have, are other ``now`` than ``before``; "" for none."""
    others = [name for name in now if name in before and now[name] != before[name]]
    return ", ".join(f"{name}={now[name]!r}, which was {before[name]!r}" for name in others)


def _places(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns where a run's layers and samples are: elsewhere sums may round, and dropout draws, in another way."""
    alone = {"stages": 1, "replicas": 1, "balance": "layers"}
    return {name: settings.get(name, default) for name, default in alone.items()}


def _learned(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what of a run's settings, which an earlier version may have written, decides which numbers it learns."""
    found = {name: settings[name] for name in SAME if name in settings}
    samples = settings.get("micro_batch")
    if samples is not None and samples >= settings["batch"]:  # as without
        found["micro_batch"] = None
    if (parts := micro_batches_of(settings)) is not None:  # compared among as many replicas: others have other parts
        replicas = settings.get("replicas", 1)
        found["micro_batches" + (f" of each of {replicas} replicas" if replicas > 1 else "")] = parts
    if settings.get("compile"):  # compiled layers that keep activations round in another way
        found["activations"] = without_place(settings["activations"])
    return found


def _settings_of(manifest: Manifest) -> dict[str, Any]:
    settings: dict[str, Any] = from_plain(manifest.extra)["settings"]
    return settings


def _position(manifest: Manifest) -> int:
    extra = from_plain(manifest.extra)
    return int(extra["position"]) if isinstance(extra, dict) and "position" in extra else int(manifest.step)

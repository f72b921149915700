"""What training takes of each memory, and where its last step's time went."""

from __future__ import annotations

from dataclasses import dataclass

from stronghold.planned import PlannedStep
from stronghold.step_times import StageTimes, StepTimes
from stronghold.tables import Shown
from stronghold.units import format_bytes, format_count


@dataclass(frozen=True, kw_only=True)
class Report(Shown):
    """What a model under training takes, in bytes by place; ``str()`` of it is a table to read.

    ``peak_device_bytes`` is 0 where the device does not count. ``states`` is the format of the optimizer's moments,
    None without one. ``accumulation_bytes`` are not held yet: they are what a second ``backward()`` before ``step()``
    takes, for sums in fp32. ``process_host_bytes`` is what the process had in memory, the interpreter and its libraries
    with it, before anything was placed, without the model's own parameters.

    ``resident`` are layers, ``resident_root`` root parameters that are updated on the device; what these and the layers
    hold there is ``resident_device_bytes``. ``root_device_bytes`` is what buffers and the other root parameters take.

    Not counted on the device: ``root_gradients_device_bytes``, which autograd holds from ``backward()`` to
    ``zero_grad()``, and for a moment twice where weights are tied; ``update_device_bytes``, which Muon's iteration
    takes while it runs; activations; and what the operation under way needs. Where device and host are one memory, all
    of that is on the host, with what the C library keeps of it for the next step. ``beside_host_bytes`` is what it has
    come to by now: the process's memory in RAM that is no file's, less what was there before and what is counted. It
    says nothing before the first step, which first touches what is counted.

    ``inputs_host_bytes`` and ``inputs_disk_bytes`` are what ``activations="host"`` and ``"disk"`` have come to take by
    now for layers' inputs; of the host it is counted above, of the disk it comes beside ``disk_bytes``. Where
    ``offload`` was given ``inputs=``, the host's are known before: ``inputs_to_come_bytes`` are not taken yet.

    ``on_root_disk`` tells that one of ``disk_paths`` is on the system's disk, which wears with every step;
    ``weights_on_disk`` and ``states_on_disk`` are numbers of layers. ``other_optimizers`` are those of other kinds than
    ours that have stepped the model, and ``others_host_bytes`` and ``others_device_bytes`` what their states take.
    ``step`` is None before the first step; ``stages`` are this process's, of a model in stages that computed a batch.
    ``planned`` is what was planned for, where ``offload`` was given a plan or made one; ``awaits_inputs`` tells of one
    to come for the first training pass, until which all this holds. Of the layers that are to be compiled ``compiled``
    ran compiled in their last call, and ``not_compiled`` eagerly. ``experts_per_part`` is how many experts of a mixture
    make a part, each counted as a layer, None where layers are whole.
    """

    parameters: int
    trainable_parameters: int
    layers: int
    window: int
    resident: int
    device: str
    dtype: str
    states: str | None
    slots_device_bytes: int
    gradients_device_bytes: int
    root_device_bytes: int
    resident_device_bytes: int
    peak_device_bytes: int
    pinned_host_bytes: int
    pageable_host_bytes: int
    process_host_bytes: int
    disk_bytes: int
    disk_paths: tuple[str, ...]
    on_root_disk: bool
    accumulation_bytes: int
    skipped_steps: int
    step: StepTimes | None
    weights_on_disk: int = 0
    states_on_disk: int = 0
    other_optimizers: tuple[str, ...] = ()
    others_host_bytes: int = 0
    others_device_bytes: int = 0
    root_gradients_device_bytes: int = 0
    update_device_bytes: int = 0
    beside_host_bytes: int = 0
    resident_root: int = 0
    inputs_host_bytes: int = 0
    inputs_to_come_bytes: int = 0
    inputs_disk_bytes: int = 0
    stages: tuple[StageTimes, ...] = ()
    planned: PlannedStep | None = None
    compiled: int = 0
    not_compiled: int = 0
    experts_per_part: int | None = None
    awaits_inputs: bool = False

    @property
    def device_bytes(self) -> int:
        """What is held on the device between steps: slots, gradients, the root, what is resident, others' states."""
        streamed = self.slots_device_bytes + self.gradients_device_bytes
        return streamed + self.root_device_bytes + self.resident_device_bytes + self.others_device_bytes

    @property
    def host_bytes(self) -> int:
        """What is held in host memory: pinned, pageable, and what other optimizers hold."""
        return self.pinned_host_bytes + self.pageable_host_bytes + self.others_host_bytes

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value); a section's later lines leave it empty."""
        parameters = format_count(self.parameters)
        if self.trainable_parameters != self.parameters:
            parameters += f", {format_count(self.trainable_parameters)} of them trained"
        resident = f", {self.resident} resident" if self.resident else ""
        rows = [
            ("model", "parameters", parameters),
            ("", "layers", f"{self.layers}{resident}, {self.window} at a time on {self.device}"),
            *([("", "experts in a part", f"{self.experts_per_part}")] if self.experts_per_part else []),
            *([("", "compiled layers", self._compiled())] if self.compiled or self.not_compiled else []),
            ("", "compute type", self.dtype),
            ("", "moments", ", ".join(filter(None, (self.states, *self.other_optimizers))) or "none yet"),
            ("device", "slots", format_bytes(self.slots_device_bytes)),
            ("", "gradients", format_bytes(self.gradients_device_bytes)),
            ("", "root", format_bytes(self.root_device_bytes)),
            *([("", self._resident(), format_bytes(self.resident_device_bytes))] if self._resident() else []),
            *([("", "other states", format_bytes(self.others_device_bytes))] if self.others_device_bytes else []),
            ("", "together", format_bytes(self.device_bytes)),
            (
                "",
                "in a step",
                f"{format_bytes(self.root_gradients_device_bytes)} more for the root's gradients, and activations",
            ),
            *([("", "in an update", f"{format_bytes(more)} more")] if (more := self.update_device_bytes) else []),
            ("", "peak", format_bytes(self.peak_device_bytes) if self.peak_device_bytes else "not counted"),
            ("host", "pinned", format_bytes(self.pinned_host_bytes)),
            ("", "pageable", format_bytes(self.pageable_host_bytes)),
            *([("", "other states", format_bytes(self.others_host_bytes))] if self.others_host_bytes else []),
            ("", "together", format_bytes(self.host_bytes)),
            *([("", "layers' inputs", self._inputs())] if self._inputs() else []),
            ("", "to accumulate", f"{format_bytes(self.accumulation_bytes)} more"),
            ("", "process", f"{format_bytes(self.process_host_bytes)} more, before anything was placed"),
            *([("", "not counted", f"{format_bytes(self.beside_host_bytes)} more by now")] if self.step else []),
            ("disk", "layers and states", format_bytes(self.disk_bytes)),
            *(self._disk_rows() if self.disk_paths else []),
            *([("", "layers' inputs", format_bytes(self.inputs_disk_bytes))] if self.inputs_disk_bytes else []),
            *([("", "note", "this is the system's own disk: training wears it")] if self.on_root_disk else []),
        ]
        rows += self.step.rows() if self.step is not None else []
        rows += [row for one in self.stages for row in one.rows()]
        rows += self.step.disk_rows() if self.step is not None and self.disk_paths else []
        if self.skipped_steps:
            rows.append(("steps", "skipped", f"{self.skipped_steps}, for gradients that were not finite"))
        return rows + self._planned_rows()

    def _planned_rows(self) -> list[tuple[str, str, str]]:
        if (planned := self.planned) is None:
            to_come = "of window, resident layers and activations, for the first training pass"
            return [("plan", "to come", to_come)] if self.awaits_inputs else []
        rows = [("plan", "settings", planned.chosen), ("", "why", planned.reason)]
        if (step := self.step) is not None:
            peaks = {"device": self.peak_device_bytes} if self.peak_device_bytes else {}
            rows += planned.of_passes(step.passes).rows(step.training_s, vars(step), peaks)
        return rows

    def _resident(self) -> str:
        """Returns what is updated on the device: of layers and root parameters those of which there are some."""
        named = (("layers", self.resident), ("root parameters", self.resident_root))
        found = " and ".join(name for name, count in named if count)
        return found and f"resident {found}"

    def _inputs(self) -> str:
        """Returns what layers' inputs take of the host's memory, and what of it is not there yet."""
        now, to_come = self.inputs_host_bytes, self.inputs_to_come_bytes
        told = f"{format_bytes(now)} of it" if now else "", f"{format_bytes(to_come)} more" if to_come else ""
        return ", ".join(filter(None, told))

    def _compiled(self) -> str:
        eagerly = f"; {self.not_compiled} ran eagerly, as a warning has said" if self.not_compiled else ""
        return f"{self.compiled} in their last call{eagerly}"

    def _disk_rows(self) -> list[tuple[str, str, str]]:
        there = f"weights of {self.weights_on_disk} and states of {self.states_on_disk} of {self.layers} layers"
        return [("", "namely", there), ("", "in", ", ".join(self.disk_paths))]


@dataclass(frozen=True, kw_only=True)
class Measured(Shown):
    """What a method that does not plan its memory is seen to take; ``str()`` of it is a table to read.

    ``device_bytes`` is 0 where device and host are one memory and the method cannot tell what is on which.
    ``host_bytes`` is the resident memory of the process, its libraries with it. ``disk_bytes`` is what its files take;
    of ``step`` only the disk's numbers are known, and it is None for a method without one.
    """

    parameters: int
    device: str
    dtype: str
    device_bytes: int
    peak_device_bytes: int
    host_bytes: int
    disk_bytes: int = 0
    disk_paths: tuple[str, ...] = ()
    on_root_disk: bool = False
    skipped_steps: int = 0
    step: StepTimes | None = None

    def rows(self) -> list[tuple[str, str, str]]:
        """Returns the table's lines: (section, name, value)."""
        rows = [
            ("model", "parameters", format_count(self.parameters)),
            ("", "compute type", self.dtype),
            (self.device, "held", format_bytes(self.device_bytes) if self.device_bytes else "not told apart"),
            ("", "peak", format_bytes(self.peak_device_bytes) if self.peak_device_bytes else "not counted"),
            ("host", "process", format_bytes(self.host_bytes)),
        ]
        if self.disk_paths:
            rows += [("disk", "files", format_bytes(self.disk_bytes)), ("", "in", ", ".join(self.disk_paths))]
        return rows

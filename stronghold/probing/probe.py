"""``stronghold.probe``: measures this machine for the planner."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import torch

from stronghold.device import Device, drawn_apart, open_device
from stronghold.native import hold_tensor_heap, keep_freed_memory, return_free_memory
from stronghold.planner.machine_file import BESIDE_COMPUTE, DISK, LINK, UPDATE, MachineFile, Spread
from stronghold.planner.step_bytes import MUON
from stronghold.probing.caches import cache_bytes
from stronghold.probing.call_speed import call_measures
from stronghold.probing.disk_speed import check_directory, disk_measures
from stronghold.probing.kept_machines import check_can_keep, keep_machine, kept_machine
from stronghold.probing.link_speed import Link
from stronghold.probing.memory_speed import memory_measures
from stronghold.probing.operator_speed import DTYPES, attention_of, operator_measures, products_of
from stronghold.probing.process_link import process_link
from stronghold.probing.rounds import LEAST_ROUNDS, Measure, Sampled, sample_all
from stronghold.probing.stopwatches import DeviceClock
from stronghold.probing.this_machine import Facts, device_given, facts_of
from stronghold.probing.update_speed import DeviceUpdates, HostUpdates
from stronghold.settings import STATES

LEAST_SECONDS = 1.0


def probe(
    device: str | torch.device | None = None,
    *,
    directories: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    seconds: float = 40.0,
    keep: bool = True,
    progress: Callable[[str, float], None] | None = None,
) -> MachineFile:
    """Measures this machine for ``stronghold.plan``, each number several times, and keeps what it found.

    The machine should have nothing else to do meanwhile. Of a device whose memory is the host's, the link is the copy
    of a layer into a slot. Between processes it measures two of the CPU, or of two GPUs where there are as many.

    Args:
        device: Where layers are to compute; by default the machine's accelerator, or the CPU where it has none.
        directories: Those whose disks are measured, each with a scratch file of up to 384 MiB that has no name.
        seconds: About how long to measure. One round over everything to warm up and three that are measured are made
            in any case, so that the least is about half a minute, and more with disks.
        keep: Whether to write the result to ``~/.cache/stronghold/machines``, from where ``stronghold.plan`` takes it.
            Directories that were probed before stay in it.
        progress: Called with what is measured next, and the share that is done.

    Returns:
        What was measured: its ``write(path)`` makes a file for ``plan(machine=path)`` on any machine.

    Raises:
        StoreError: A directory that is not there, cannot be written, or has no room.
        StrongholdError: A result that cannot be kept.
        ValueError: A device that this machine does not have, or ``seconds`` out of range.
    """
    if not LEAST_SECONDS <= seconds < 86400:
        raise ValueError(
            f"seconds must be a number from {LEAST_SECONDS:g} to a day's (got {seconds!r}); leave it out for 40"
        )
    given = [directories] if isinstance(directories, (str, os.PathLike)) else directories
    paths = list(dict.fromkeys(check_directory(path) for path in given))
    opened = open_device(device_given(device))
    facts = facts_of(opened.torch_device)
    if keep:
        check_can_keep(facts)
    with process_link(opened.torch_device) as messages:
        machine = _machine(opened, paths, DTYPES, (*STATES, MUON), messages, seconds=seconds, progress=progress)
    if not keep:
        return machine
    before = kept_machine(opened.torch_device)
    if before is not None:
        machine = replace(machine, disks={**before.disks, **machine.disks})
    keep_machine(machine, facts)
    return machine


def glance(device: Device, directories: Sequence[str] = (), dtypes: Sequence[torch.dtype] = DTYPES) -> MachineFile:
    """Returns what one round finds, for a plan made on the way, of a model in ``dtypes`` and moments in fp32.

    It is not kept.
    """
    paths = [check_directory(path) for path in directories]
    return _machine(device, paths, dtypes, ("fp32",), seconds=LEAST_SECONDS, least=1)


def _machine(
    device: Device,
    directories: Sequence[str],
    dtypes: Sequence[torch.dtype],
    states: Sequence[str],
    others: Sequence[Measure] = (),
    *,
    seconds: float,
    least: int = LEAST_ROUNDS,
    progress: Callable[[str, float], None] | None = None,
) -> MachineFile:
    peak_bytes = device.peak_bytes()
    with drawn_apart(device.torch_device):
        samples = _sampled(device, directories, dtypes, states, others, seconds=seconds, least=least, progress=progress)
    gc.collect()  # what was measured with went with that call, but for autograd's graphs, which are in cycles
    return_free_memory()
    if device.torch_device.type != "cpu":
        torch.accelerator.empty_cache()  # it is free when the device is asked
        if device.peak_bytes() > peak_bytes:
            torch.accelerator.reset_peak_memory_stats(device.torch_device)  # and is no model's
    return _filled(device, facts_of(device.torch_device), directories, samples)


def _sampled(
    device: Device,
    directories: Sequence[str],
    dtypes: Sequence[torch.dtype],
    states: Sequence[str],
    others: Sequence[Measure],
    *,
    seconds: float,
    least: int,
    progress: Callable[[str, float], None] | None,
) -> Sampled:
    """Returns what was found; the clock, which has what it timed, and all else that was measured with end here."""
    clock = DeviceClock(device)
    formats = list(itertools.product(dtypes, states))
    with disk_measures(clock, directories) as disks:
        if device.is_host:
            hold_tensor_heap(clock)  # as an offloaded model does
            keep_freed_memory(clock)  # and its optimizer
        measures = [
            *Link(device).measures(),
            *operator_measures(clock, dtypes),
            # Models in bf16, too, have norms and losses in fp32.
            *memory_measures(clock, list(dict.fromkeys((*dtypes, torch.float32)))),
            *call_measures(clock),
            *HostUpdates(clock, formats).measures(),
            *(() if device.is_host else DeviceUpdates(clock, formats).measures()),
            *disks,
            *others,
        ]
        return sample_all(measures, seconds=seconds, least=least, progress=progress)


def _filled(device: Device, facts: Facts, directories: Sequence[str], samples: Sampled) -> MachineFile:
    """Returns the file with what was found."""

    def by(*first: str) -> dict[str, Spread]:
        """Returns the spreads of the keys that begin with ``first`` and have one word more, by that."""
        return {key[-1]: samples.spread(key) for key in samples if key[:-1] == first}

    def kinds(what: str, names: Sequence[str], of: Sequence[str]) -> Mapping[str, Mapping[str, Spread]]:
        return {name: {kind: samples.spread((what, name, kind)) for kind in of} for name in names}

    formats = dict.fromkeys(key[1] for key in samples if key[0] == "update")
    return MachineFile(
        **vars(facts),
        is_host=device.is_host,
        runs_behind=not device.is_host,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        link={name: samples.spread(("link", name)) for name in LINK},
        matmul=products_of(samples),
        attention=attention_of(samples),
        elementwise=by("elementwise"),
        elementwise_cached=by("cached"),
        transcendental=by("transcendental"),
        cache_bytes=cache_bytes(device.torch_device),
        op_s=samples.spread(("op_s",)),
        launch_s=samples.spread(("launch_s",)),
        host_call_s=samples.spread(("host_call_s",)),
        host_update_ns=kinds("update", list(formats), UPDATE),
        compute_beside_update=samples.spread(("compute_beside_update",)),
        device_update_ns=by("device_update"),
        disks=kinds("disk", directories, (*DISK, *BESIDE_COMPUTE)),
        processes=by("processes"),
    )

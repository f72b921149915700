"""A machine that was measured, with another number of cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from stronghold.planner.machine_file import Attention, MachineFile, Product, Spread
from stronghold.planner.op_costs import imbalance


def with_cores(machine: MachineFile, cores: int) -> MachineFile:
    """Returns ``machine`` as if it had so many cores: what they do takes time in proportion.

    That is the host's updates, and where the host computes all operators. The memory's rates are taken to grow with
    the cores, as on a larger processor with more channels, and links, disks and what it takes to issue an operator to
    stay as they are. Raises ValueError for less than one core.
    """
    _check(cores)
    faster = cores / machine.cores
    updates = {form: _times(kinds, 1 / faster) for form, kinds in machine.host_update_ns.items()}
    threads = None if machine.threads is None else max(1, round(machine.threads * faster))
    found = replace(machine, cores=cores, threads=threads, host_update_ns=updates)
    if not machine.is_host:
        return found
    return replace(
        found,
        matmul=[Product(one.dtype, one.sizes, _time(one.flop_per_s, faster)) for one in machine.matmul],
        attention=[
            Attention(
                one.dtype,
                one.sizes,
                _time(one.forward_flop_per_s, faster),
                _time(
                    one.backward_flop_per_s, faster * _evener(one, machine.computing_threads, found.computing_threads)
                ),
            )
            for one in machine.attention
        ],
        elementwise=_times(machine.elementwise, faster),
        elementwise_cached=_times(machine.elementwise_cached, faster),
        transcendental=_times(machine.transcendental, faster),
        device_update_ns=_times(machine.device_update_ns, 1 / faster),
    )


def _evener(one: Attention, before: int, threads: int) -> float:
    """Returns how many times as evenly so many threads share its backward pass as those ``before``."""
    batch, heads, *_ = one.sizes
    return imbalance(batch * heads, before) / imbalance(batch * heads, threads)


def _times(each: Mapping[str, Spread], factor: float) -> dict[str, Spread]:
    return {name: _time(one, factor) for name, one in each.items()}


def _time(one: Spread, factor: float) -> Spread:
    return Spread(*(factor * value for value in one))


def cores_assumed(measured: MachineFile, cores: int) -> str:
    """Returns what a plan for so many cores rests on. Raises ValueError as :func:`with_cores` does."""
    _check(cores)
    what = "updates and computing" if measured.is_host else "updates"
    return (
        f"{cores} cores, with memory in proportion: {what} take {measured.cores / cores:.3g} times as long as was "
        f"measured with {measured.cores}"
    )


def _check(cores: object) -> None:
    if not isinstance(cores, int) or isinstance(cores, bool) or cores < 1:
        raise ValueError(f"cores must be a whole number of 1 or more (got {cores!r}); pass one, or None")

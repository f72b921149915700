"""What issuing a step takes of the host's thread: PyTorch's operators, and what the engine itself does for a layer."""

from __future__ import annotations

from dataclasses import replace

from stronghold.planner.program import Kind
from stronghold.planner.step_costs import HostWork, LayerWork, Machine, StepSettings

CALLS = HostWork(
    forward_s=55, backward_s=90, streamed_forward_s=160, streamed_backward_s=280, again_s=170, update_s=150
)
"""What the engine does for a layer of twelve parameters, in small operators that the host computes (``host_call_s``).

``benchmarks/overhead.py`` measures both in one run, on a processor: what a layer takes of the thread beyond plain
PyTorch's, and a step. How the two compare on the host of a GPU, where issuing copies is in the first, was not measured.
"""


def host_work_of(call_s: float) -> HostWork:
    """Returns the seconds of a host on which a small operator takes ``call_s``."""
    return HostWork(**{name: call_s * calls for name, calls in vars(CALLS).items()})


def issued_s(kind: Kind, layer: LayerWork, machine: Machine, settings: StepSettings, *, resident: bool) -> float:
    """Returns what issuing a layer's forward pass, its backward pass or its update on the device takes.

    In the backward pass a layer that is recomputed is issued again, and under ``in_backward`` one in the store hands
    its update to the host. In the optimizer's step that is not counted: the device has nothing to do meanwhile. What
    is frozen has no gradients to take: its backward pass is like a forward pass.
    """
    own = machine.host_work
    if kind is Kind.LAUNCH_UPDATE:
        return own.update_s
    forward_s, backward_s = (
        (own.forward_s, own.backward_s) if resident else (own.streamed_forward_s, own.streamed_backward_s)
    )
    if kind is Kind.LAUNCH:
        return settings.pieces * (machine.launch_s + forward_s)
    passes_s = machine.launch_s + (backward_s if layer.elements else forward_s)
    if layer.recomputed:
        passes_s += machine.launch_s + own.again_s
    handed_s = own.update_s if settings.in_backward and layer.elements and not resident else 0.0
    return settings.pieces * passes_s + handed_s


def with_issuing(layer: LayerWork, machine: Machine, settings: StepSettings, *, resident: bool) -> LayerWork:
    """Returns what a layer computes with what issuing it takes, where the thread that issues it computes it, too.

    The update of a resident one counts in its backward pass.
    """
    if machine.runs_behind:
        return layer
    forward_s, backward_s, update_s = (
        issued_s(kind, layer, machine, settings, resident=resident)
        for kind in (Kind.LAUNCH, Kind.LAUNCH_BACKWARD, Kind.LAUNCH_UPDATE)
    )
    if resident and layer.elements:
        backward_s += update_s
    return replace(layer, forward_s=layer.forward_s + forward_s, backward_s=layer.backward_s + backward_s)

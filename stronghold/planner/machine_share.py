"""What one of several processes has of a machine that all of them are on, and what replicas add to its gradients."""

from __future__ import annotations

import math
from dataclasses import replace

from stronghold.planner.step_costs import Machine


def share_of(machine: Machine, processes: int, *, is_host: bool) -> Machine:
    """Returns what each of so many processes has of a ``machine`` on which all of them do the same at the same time.

    The threads that update and the disks are in common. Each accelerator is its process's own, with its link; where
    the device's memory is the host's (``is_host``), its cores are in common, and copies within it.
    """
    if processes == 1:
        return machine
    of_device = processes if is_host else 1
    return replace(
        machine,
        host_update_ns=machine.host_update_ns * processes,
        host_add_ns=machine.host_add_ns * processes,
        device_update_ns=machine.device_update_ns * of_device,
        muon_host_ns=None if machine.muon_host_ns is None else machine.muon_host_ns * processes,
        muon_device_ns=None if machine.muon_device_ns is None else machine.muon_device_ns * of_device,
        h2d_bytes_per_s=machine.h2d_bytes_per_s / of_device,
        d2h_bytes_per_s=machine.d2h_bytes_per_s / of_device,
        disk_read_bytes_per_s=machine.disk_read_bytes_per_s / processes,
        disk_write_bytes_per_s=machine.disk_write_bytes_per_s / processes,
    )


def reduced(machine: Machine, replicas: int, *, message_s: float, bytes_per_s: float) -> Machine:
    """Returns a process's share of a machine with what gradients take on their way to the host in each of ``replicas``.

    A layer's gradients are reduce-scattered: each replica sends all but its share, in as many messages as there are
    other replicas (:func:`stronghold.planner.link_bytes.reduce_scatter_bytes`), and copies its share alone. A layer's
    work counts all bytes of its gradients, so that both are in one rate. ``message_s`` and ``bytes_per_s`` are what
    messages between processes take.
    """
    if replicas == 1:
        return machine
    seconds_per_byte = (replicas - 1) / replicas / bytes_per_s + 1 / replicas / machine.d2h_bytes_per_s
    return replace(
        machine,
        d2h_bytes_per_s=1 / seconds_per_byte if seconds_per_byte else math.inf,
        reduce_s=(replicas - 1) * message_s,
    )


def all_reduce_s(gradient_bytes: int, replicas: int, *, message_s: float, bytes_per_s: float) -> float:
    """Returns what it takes that each of ``replicas`` has the mean of gradients that stay on the device."""
    return 2 * ((replicas - 1) * message_s + (replicas - 1) / replicas * gradient_bytes / bytes_per_s)

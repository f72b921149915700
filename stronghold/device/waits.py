"""The engine's waits: every one of them, with its reason."""

from __future__ import annotations

from collections import deque
from enum import Enum

from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.streams import Stream

KEPT_WAITS = 8192
"""Waits that are remembered for the report: a long evaluation takes no step that would cut them."""


class Wait(Enum):
    """Every wait of the engine for what its own process does, with its reason. There is none without one of these.

    Where replicas wait for one another they meet (stronghold.unit.replicas).
    """

    SLOT_FREE = "a fetch overwrites a slot: the last computation with it must have read it"
    FETCHED = "a computation reads a slot: its fetch must be complete"
    UPDATED = "a fetch reads the host's weights: their update must be complete"
    WEIGHTS_READ = "the user reads a layer's weights on the host: their update must be complete"
    WEIGHTS_FETCHED = "the user may write a layer's weights on the host: a computation's fetch of them must be complete"
    COPIES = "the host uses what the user, or torch, copies to or from it without waiting: that must be complete"
    UPDATE_READ = "the host reads or writes what an update writes, by a way that nobody watches: it must be complete"
    GRADIENT_SLOT_FREE = "a computation refills a gradient slot: its last copy down must be complete"
    GRADIENT_WRITTEN = "a copy down reads a gradient slot: the computation must have filled it"
    GRADIENT_READ = "gradients are published on the host: their copy down must be complete"
    GRADIENT_ADDED = "gradients are published on the host: their addition must be complete"
    GRADIENT_ADD = "the host adds a gradient from staging: its copy down must be complete"
    GRADIENT_UPDATE = "an update reads a gradient that comes down, to staging or of the root: the copy must be complete"
    STAGING_FREE = "a copy down refills the host's staging: what read it must be complete"
    BUFFER_FREE = "a disk is read into staging: the copy from it, or the read before, must be complete"
    DIRECTION = "an update moves weights along a direction that comes down from the device: the copy must be complete"
    UPDATE_WRITTEN_BACK = "a layer is read ahead from its file: what its update wrote must have arrived there"
    READ_AHEAD = "a fetch copies from staging: the layer must have been read"
    FILE_READ = "an update writes a layer's weights or its file: what a computation reads of them must be complete"
    UPDATE_DONE = "the user waits until an update has arrived in its file: it must have written all"
    SHARE_UPDATED = "a replica tells the others that its share is updated: that update must be complete"
    ROOT_GRADIENT = "the host reads the squares of a gradient on the device: it must be complete, and they copied down"
    ROOT_WRITTEN = "the host reads a root parameter that the user wrote on the device: its copy down must be complete"
    ROOT_UPDATED = "an upload reads a root parameter's host weights: their update must be complete"
    ROOT_UPLOADED = "a computation reads a root parameter: its upload must be complete"
    INPUT_SLOT_FREE = "a computation refills an activation slot: its last copy down must be complete"
    INPUT_WRITTEN = "a copy down reads an activation slot: the computation must have filled it"
    INPUT_STAGED = "the disk is given a layer's inputs from staging: their copy down must be complete"
    INPUT_STAGING_FREE = "inputs refill staging: the disk must have been given those before, and they copied up"
    INPUT_DOWN = "a copy up reads the host's activations: their copy down, or read, must be complete"
    INPUT_SLOT_READ = "a copy up overwrites an activation slot: the computation with it must have ended"
    INPUT_UP = "a computation reads an activation slot: its copy up must be complete"


class Waits:
    """Makes streams wait. One place for all of them, so that a test can take each away in turn."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.for_updates: deque[tuple[object, object]] = deque(maxlen=KEPT_WAITS)
        """When the user has waited for an update: (begin, end), stamps of the device."""

    def stream(self, stream: Stream, event: Event | None, reason: Wait) -> None:
        if event is not None:
            stream.wait(event)

    def thread(self, stream: Stream, event: Event | None, reason: Wait) -> None:
        if event is not None:
            stream.synchronize(event)

    def compute(self, event: Event | None, reason: Wait) -> None:
        if event is not None:
            self.device.compute_wait(event)

    def host(self, event: Event | None, reason: Wait) -> None:
        if event is not None:
            self.device.host_wait(event)

    def behind(self, reason: Wait) -> None:
        """Has the host wait for all that the calling thread has given the device."""
        self.host(self.device.record_event(), reason)

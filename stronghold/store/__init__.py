"""Where layers live when they are not in the window."""

from stronghold.store.directory import forget
from stronghold.store.disk import DiskStore
from stronghold.store.kept import in_memory
from stronghold.store.limits import Budget
from stronghold.store.ram import RamStore
from stronghold.store.ring import RING_BYTES
from stronghold.store.staging import BUFFERS as DISK_BUFFERS
from stronghold.store.staging import staging_bytes
from stronghold.store.store import Store, UpdateIO

__all__ = [
    "DISK_BUFFERS",
    "RING_BYTES",
    "Budget",
    "DiskStore",
    "RamStore",
    "Store",
    "UpdateIO",
    "forget",
    "in_memory",
    "staging_bytes",
]

"""Where layers live when they are not in the window."""

from stronghold.store.directory import check_free, forget
from stronghold.store.disk import DiskStore
from stronghold.store.input_file import INPUT_STAGING, Extent, InputFile
from stronghold.store.kept import in_memory
from stronghold.store.limits import Budget
from stronghold.store.ram import RamStore
from stronghold.store.ring import SLOT_BYTES, SLOTS
from stronghold.store.staging import BUFFERS as DISK_BUFFERS
from stronghold.store.staging import staging_bytes
from stronghold.store.store import Store, UpdateIO

__all__ = [
    "DISK_BUFFERS",
    "INPUT_STAGING",
    "SLOTS",
    "SLOT_BYTES",
    "Budget",
    "DiskStore",
    "Extent",
    "InputFile",
    "RamStore",
    "Store",
    "UpdateIO",
    "check_free",
    "forget",
    "in_memory",
    "staging_bytes",
]

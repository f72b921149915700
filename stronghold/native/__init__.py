"""What is compiled: the host's kernels and the disk's threads, in checked, typed wrappers.

The only room that imports ``stronghold._C``. The interpreter lock is released while compiled code runs or waits.
"""

from stronghold.native.disk_errors import BufferedDiskWarning, UnreservedDiskWarning, warn_of_no_reserve
from stronghold.native.disk_io import (
    DISK_THREADS,
    PIECE_BYTES,
    SUM_BYTES,
    Disk,
    DiskCounters,
    DiskFile,
    Priority,
    Transfer,
    checksums,
    crc32c,
)
from stronghold.native.faults import Fault
from stronghold.native.heap import (
    hold_tensor_heap,
    keep_freed_memory,
    return_free_memory,
)
from stronghold.native.host_memory import host_bytes, most_host_bytes
from stronghold.native.kernels import (
    BLOCK,
    Addition,
    Blocks,
    Segment,
    accumulate,
    adamw,
    available_isas,
    best_isa,
    squared_norms,
    stream,
)
from stronghold.native.muon_kernels import Momentum, Moved, muon_momentum, muon_move
from stronghold.native.processor import usable_cores
from stronghold.native.team import in_team

__all__ = [
    "BLOCK",
    "DISK_THREADS",
    "PIECE_BYTES",
    "SUM_BYTES",
    "Addition",
    "Blocks",
    "BufferedDiskWarning",
    "Disk",
    "DiskCounters",
    "DiskFile",
    "Fault",
    "Momentum",
    "Moved",
    "Priority",
    "Segment",
    "Transfer",
    "UnreservedDiskWarning",
    "accumulate",
    "adamw",
    "available_isas",
    "best_isa",
    "checksums",
    "crc32c",
    "hold_tensor_heap",
    "host_bytes",
    "in_team",
    "keep_freed_memory",
    "most_host_bytes",
    "muon_momentum",
    "muon_move",
    "return_free_memory",
    "squared_norms",
    "stream",
    "usable_cores",
    "warn_of_no_reserve",
]

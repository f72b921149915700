"""Streams, events and buffers: what the engine needs of a device, and the devices that have it."""

import torch

from stronghold.device.accelerator import Accelerator, AcceleratorDevice
from stronghold.device.cpu import CpuDevice
from stronghold.device.cuda import Cuda
from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.forks import check_process, forks
from stronghold.device.generators import drawn_apart
from stronghold.device.memory import (
    Buffer,
    Common,
    DeviceBuffer,
    HostBuffer,
    available_host_bytes,
    over,
    resident_host_bytes,
)
from stronghold.device.slow_products import tell_of_slow_products
from stronghold.device.streams import Stream, finish_streams
from stronghold.device.timeline import Timeline
from stronghold.device.vector_math import find_kernels
from stronghold.device.waits import KEPT_WAITS, Wait, Waits

__all__ = [
    "ACCELERATORS",
    "KEPT_WAITS",
    "Accelerator",
    "AcceleratorDevice",
    "Buffer",
    "Common",
    "CpuDevice",
    "Cuda",
    "Device",
    "DeviceBuffer",
    "Event",
    "HostBuffer",
    "Stream",
    "Timeline",
    "Wait",
    "Waits",
    "available_host_bytes",
    "check_process",
    "drawn_apart",
    "finish_streams",
    "forks",
    "limit_memory",
    "open_device",
    "over",
    "resident_host_bytes",
    "tell_of_slow_products",
]

find_kernels()  # before anything computes, which may do so in several threads


ACCELERATORS: dict[str, type[Accelerator]] = {"cuda": Cuda}
"""The kinds of which more is known than of every accelerator."""
WITHOUT_STREAMS = {"mps"}
"""Accelerators in whose streams nothing runs beside the computation."""


def open_device(device: str | torch.device | Device) -> Device:
    """Opens the device named like torch names it (``"cpu"``, ``"cuda"``, ``"cuda:1"``), or returns a Device as it is.

    Raises ValueError for a kind of device that there is no engine for, or that this machine lacks.
    """
    if isinstance(device, Device):
        return device
    wanted = torch.device(device)
    return CpuDevice() if wanted.type == "cpu" else AcceleratorDevice(_opened(wanted))


def limit_memory(device: str | torch.device, limit_bytes: int) -> None:
    """Lets this process take ``limit_bytes`` of a CUDA device, whatever allocates there: more is out of memory.

    It counts what PyTorch's allocator holds, cached blocks too, and not the context of CUDA. Raises ValueError where
    this machine has no such device.
    """
    _opened(torch.device(device)).limit_memory(limit_bytes)


def _opened(wanted: torch.device) -> Accelerator:
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"device {str(wanted)!r} needs a CUDA device and a CUDA build of torch (got torch "
            f"{torch.__version__}, which sees none); pass device='cpu'"
        )
    if wanted.type != "cuda":
        found = torch.accelerator.current_accelerator(check_available=True)
        has = repr(found.type) if found is not None else "no accelerator"
        if found is None or found.type != wanted.type:
            raise ValueError(
                f"device must be 'cpu', 'cuda[:index]' or this machine's accelerator (got {str(wanted)!r}; torch "
                f"{torch.__version__} sees {has}); pass one of those"
            )
        if wanted.type in WITHOUT_STREAMS:
            raise ValueError(
                f"device {str(wanted)!r} has no streams beside one another, which layers are fetched in; pass 'cpu'"
            )
    return ACCELERATORS.get(wanted.type, Accelerator)(wanted)

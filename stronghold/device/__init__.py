"""Streams, events and buffers: what the engine needs of a device, and the devices that have it."""

import torch

from stronghold.device.cpu import CpuDevice
from stronghold.device.device import Device
from stronghold.device.events import Event
from stronghold.device.forks import check_process, forks
from stronghold.device.heap import keep_freed_memory
from stronghold.device.memory import (
    Buffer,
    Common,
    DeviceBuffer,
    HostBuffer,
    available_host_bytes,
    over,
    resident_host_bytes,
    return_free_memory,
)
from stronghold.device.streams import Stream, finish_streams
from stronghold.device.timeline import Timeline
from stronghold.device.vector_math import find_kernels
from stronghold.device.waits import KEPT_WAITS, Wait, Waits

__all__ = [
    "KEPT_WAITS",
    "Buffer",
    "Common",
    "CpuDevice",
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
    "finish_streams",
    "forks",
    "keep_freed_memory",
    "limit_memory",
    "open_device",
    "over",
    "resident_host_bytes",
    "return_free_memory",
]

find_kernels()  # before anything computes, which may do so in several threads


def open_device(device: str | torch.device | Device) -> Device:
    """Opens the device named like torch names it (``"cpu"``, ``"cuda"``, ``"cuda:1"``), or returns a Device as it is.

    Raises ValueError for a kind of device that there is no engine for, or that this machine lacks.
    """
    if isinstance(device, Device):
        return device
    wanted = torch.device(device)
    if wanted.type == "cpu":
        return CpuDevice()
    if wanted.type == "cuda":
        _check_cuda(wanted)
        from stronghold.device.cuda import CudaDevice

        return CudaDevice(wanted)
    raise ValueError(f"device must be 'cpu' or 'cuda[:index]' (got {str(wanted)!r}); pass one of those")


def limit_memory(device: str | torch.device, limit_bytes: int) -> None:
    """Lets this process take ``limit_bytes`` of a CUDA device, whatever allocates there: more is out of memory.

    It counts what PyTorch's allocator holds, cached blocks too, and not the context of CUDA. Raises ValueError where
    this machine has no such device.
    """
    wanted = torch.device(device)
    _check_cuda(wanted)
    from stronghold.device import cuda

    cuda.limit_memory(wanted, limit_bytes)


def _check_cuda(wanted: torch.device) -> None:
    if not torch.cuda.is_available():
        raise ValueError(
            f"device {str(wanted)!r} needs a CUDA device and a CUDA build of torch (got torch "
            f"{torch.__version__}, which sees none); pass device='cpu'"
        )

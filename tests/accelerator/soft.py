"""``torch.soft``: the accelerator as a device module of PyTorch, and its controls.

Importing this module makes the device ``"soft"`` known to this process, for good: PyTorch then has an accelerator, and
a library that asks for one finds it.
"""

from __future__ import annotations

import atexit
import ctypes
import struct
import sys
import types
from contextlib import contextmanager

import torch

from tests.accelerator.build import library

NAME = "soft"

_path = str(library())
torch.utils.rename_privateuse1_backend(NAME)
torch.ops.load_library(_path)
_soft = ctypes.CDLL(_path)
_soft.soft_late.argtypes = [ctypes.c_double, ctypes.c_int, ctypes.c_uint64]
_soft.soft_slow.argtypes = [ctypes.c_int64, ctypes.c_int]
_soft.soft_name.argtypes = [ctypes.c_int64, ctypes.c_char_p]
_soft.soft_check.argtypes = [ctypes.c_bool]
for _name in ("races", "synchronous_operators", "wrong_shapes"):
    getattr(_soft, f"soft_{_name}").restype = ctypes.c_char_p
_soft.soft_launches.restype = _soft.soft_total.restype = ctypes.c_uint64
_soft.soft_limit.argtypes = [ctypes.c_uint64]
_soft.soft_watch.argtypes = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_bool]
_soft.soft_unwatch.argtypes = [ctypes.c_size_t, ctypes.c_bool]
_soft.soft_host_access.argtypes = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_bool, ctypes.c_char_p]
_soft.soft_enter.argtypes = [ctypes.c_char_p]
_soft.soft_tell.restype = _soft.soft_transfer.restype = ctypes.c_void_p
_soft.soft_transfer.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_bool, ctypes.c_char_p]
_soft.soft_hear.argtypes = _soft.soft_forget.argtypes = [ctypes.c_void_p]
_soft.soft_random.argtypes, _soft.soft_random.restype = [ctypes.c_int, ctypes.c_uint64], ctypes.c_uint64


def late(probability: float, longest_us: int, seed: int = 1) -> None:
    """Makes so many of the kernels and copies late, each by up to ``longest_us`` microseconds."""
    _soft.soft_late(probability, longest_us, seed)


def slow(stream: torch.Stream | None, us: int) -> None:
    """Makes everything in a stream, the default one if none is given, take so many microseconds more."""
    _soft.soft_slow(0 if stream is None else stream.stream_id, us)


def sleep(milliseconds: int) -> None:
    """Keeps the current stream busy; the host goes on."""
    _soft.soft_sleep(milliseconds)


def name(stream: torch.Stream, given: str) -> None:
    """Calls a stream by a name in what is told of races."""
    _soft.soft_name(stream.stream_id, given.encode())


@contextmanager
def checked():
    """Checks the block for races; yields the list that they are in behind it, one line each."""
    found: list[str] = []
    torch.accelerator.synchronize()
    _soft.soft_check(True)
    try:
        yield found
        torch.accelerator.synchronize()
    finally:
        found += _soft.soft_races().decode().splitlines()
        _soft.soft_check(False)


def synchronous_operators() -> list[str]:
    """Returns the operators that had to wait for data so far."""
    return _soft.soft_synchronous_operators().decode().splitlines()


def wrong_shapes() -> list[str]:
    """Returns where an operator's meta kernel told another shape or dtype than its CPU kernel made."""
    return _soft.soft_wrong_shapes().decode().splitlines()


def launches() -> int:
    """Returns how many kernels and copies were launched so far."""
    return _soft.soft_launches()


def limit(total_bytes: int) -> None:
    """Gives the device so much memory; what was taken before stays."""
    _soft.soft_limit(total_bytes)


@contextmanager
def limited(total_bytes: int):
    """Gives the device so much memory within the block."""
    before = _soft.soft_total()
    limit(total_bytes)
    try:
        yield
    finally:
        _soft.soft_limit(before)


def watch(address: int, length_bytes: int, *, pinned: bool) -> None:
    """Has accesses to the host's memory noted; pinned, copies from and to it are asynchronous."""
    _soft.soft_watch(address, length_bytes, pinned)


def unwatch(address: int, *, pinned: bool) -> None:
    _soft.soft_unwatch(address, pinned)


def touch(tensor: torch.Tensor, *, write: bool, by: str) -> None:
    """Notes that the calling thread itself reads or writes a contiguous tensor on the host."""
    if tensor.nbytes:
        _soft.soft_host_access(tensor.data_ptr(), tensor.nbytes, write, by.encode())


def enter(given: str) -> None:
    """Makes the calling thread a line of its own: what it does is not ordered beside the others by itself."""
    _soft.soft_enter(given.encode())


class Told:
    """What the thread that made this had done by then, for another to hear of."""

    def __init__(self, told: int | None = None) -> None:
        self._told = _soft.soft_tell() if told is None else told

    def hear(self) -> None:
        _soft.soft_hear(self._told)

    def __del__(self) -> None:
        if _soft is not None:  # else the interpreter is at its end
            _soft.soft_forget(self._told)


_FILES = 1 << 60
_MOST_OF_A_FILE = 1 << 40
_files: dict[str, int] = {}
"""Where the bytes of each file have addresses, which no memory has."""


def transfer(tensor: torch.Tensor, path: str, offset: int, *, to_file: bool) -> Told:
    """Notes that a disk's threads copy between a tensor and a file from now on; returns what is behind their end."""
    if path not in _files:
        _files[path] = _FILES + len(_files) * _MOST_OF_A_FILE
        watch(_files[path], _MOST_OF_A_FILE, pinned=False)
    by = "a write to a file" if to_file else "a read from a file"
    return Told(_soft.soft_transfer(tensor.data_ptr(), _files[path] + offset, tensor.nbytes, to_file, by.encode()))


# ---- what PyTorch asks a device module ----

_initialized = True  # torch.utils.checkpoint keeps a device's random state only where it finds this


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: object) -> None:
    pass


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def synchronize(device: object = None) -> None:
    torch.accelerator.synchronize()


def current_stream(device: object = None) -> torch.Stream:
    return torch.accelerator.current_stream()


class device:
    def __init__(self, device: object) -> None:
        pass

    def __enter__(self) -> device:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def mem_get_info(device: object = None) -> tuple[int, int]:
    total = _soft.soft_total()
    return total - torch.accelerator.memory_allocated(), total


def get_rng_state(device: object = None) -> torch.Tensor:
    state = struct.pack("QQ", _soft.soft_random(0, 0), _soft.soft_random(1, 0))
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: object = None) -> None:
    seed, count = struct.unpack("QQ", bytes(state.tolist()))
    _soft.soft_random(2, seed)
    _soft.soft_random(3, count)


def manual_seed(seed: int) -> None:
    _soft.soft_random(2, seed % 2**64)


manual_seed_all = manual_seed

_module: types.ModuleType = sys.modules[__name__]
torch._register_device_module(NAME, _module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
torch.empty(1, pin_memory=True)  # PyTorch takes no memory for pinned before its device has been initialised
atexit.register(torch.accelerator.synchronize)
_dlpack_device = torch.Tensor.__dlpack_device__


def _dlpack_device_of(self: torch.Tensor) -> object:
    """PyTorch compares the device with the name that it had before it was renamed."""
    if self.device.type == NAME:
        return torch.utils.dlpack.DLDeviceType.kDLExtDev, 0
    return _dlpack_device(self)


torch.Tensor.__dlpack_device__ = _dlpack_device_of  # type: ignore[method-assign, assignment]

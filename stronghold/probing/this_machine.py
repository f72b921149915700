"""What a machine is: its processor, memory, device and versions, as far as they are told without measuring."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from stronghold import native
from stronghold.version import __version__

FP32_PRODUCTS = "float32_matmul_precision"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is told of a machine; the names are those of ``MachineFile``."""

    device: str
    device_name: str
    device_memory_bytes: int | None
    host_memory_bytes: int
    cores: int
    threads: int
    processor: str
    versions: Mapping[str, str]
    """And, by FP32_PRODUCTS, how PyTorch is set to multiply in fp32."""


def facts_of(device: torch.device) -> Facts:
    processor, is_cpu = processor_name(), device.type == "cpu"
    versions = {"torch": str(torch.__version__), "stronghold": __version__, "python": platform.python_version()}
    versions[FP32_PRODUCTS] = fp32_products(device)
    return Facts(
        device=device.type,
        device_name=processor if is_cpu else _device_name(device),
        device_memory_bytes=None if is_cpu else _total_bytes(device),
        host_memory_bytes=native.host_bytes(),
        cores=native.usable_cores(),
        threads=torch.get_num_threads(),
        processor=processor,
        versions=versions,
    )


def fp32_products(device: torch.device) -> str:
    """Returns how products in fp32 are computed there, in ``torch.get_float32_matmul_precision``'s words."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch's newer setting was used, and does not mix with that one
        backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
        return {"tf32": "high", "bf16": "medium"}.get(backend.matmul.fp32_precision, "highest")


def processor_name(information: Path = Path("/proc/cpuinfo")) -> str:
    try:
        for line in information.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def device_given(device: str | torch.device | None) -> torch.device:
    """Returns the device of that name; of None the accelerator, or the CPU. Raises ValueError for no name."""
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device("cpu") if found is None else found
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device must be a name that torch knows (got {str(device)!r}); pass 'cpu', 'cuda' or 'cuda:1'"
        ) from error


def _device_name(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def _total_bytes(device: torch.device) -> int | None:
    """Returns the device's memory, or None where it is not told."""
    module = torch.get_device_module(device)
    # torch 2.9 has it in the module of each kind alone
    info = getattr(torch.accelerator, "get_memory_info", None) or getattr(module, "mem_get_info", None)
    return None if info is None else int(info(device)[1])

"""safetensors files, written tensor by tensor: no more than one tensor needs to be in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from stronghold.native import crc32c

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""What a file can hold, and its name there."""
_WRITE_BYTES = 64 * 2**20


class TensorFileWriter:
    """Writes one file in the safetensors format (huggingface/safetensors, README, "Format").

    ``tensors`` says each one's dtype and shape beforehand; then each is written, in any order. Leaving the ``with``
    block syncs the file; after an error the file is removed. Raises ValueError for a dtype that the format has no name
    for, for a tensor that is not as announced, or was not written, and OSError where the disk refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        self._announced = {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}
        self._places: dict[str, int] = {}
        end = 0
        # The widest first: so each begins at a multiple of its elements' size.
        for name, (dtype, shape) in sorted(self._announced.items(), key=lambda item: -item[1][0].itemsize):
            if dtype not in DTYPES:
                raise ValueError(
                    f"a tensor in a file must be of a dtype that the format has (got {name} of {dtype}; it has "
                    f"{', '.join(str(one).removeprefix('torch.') for one in DTYPES)}); quantise to another type"
                )
            size = dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            self._places[name] = end
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self.length_bytes = self._begin + end
        self._missing = set(self._announced)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            self._write(0, len(text).to_bytes(8, "little") + text)
        except BaseException:
            self._abandon()
            raise

    def write(self, name: str, tensor: Tensor) -> int:
        """Writes one tensor; returns the CRC-32C of its bytes."""
        announced = self._announced.get(name)
        if announced != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"a tensor must be written as it was announced (got {name!r} of {tensor.dtype} and shape "
                f"{tuple(tensor.shape)}, announced {announced})"
            )
        flat = tensor.detach().cpu().contiguous().view(-1)
        if flat.numel():
            octets = flat.view(torch.uint8)
            self._write(self._begin + self._places[name], octets.numpy().data)
            crc = crc32c(octets)
        else:
            crc = 0
        self._missing.discard(name)
        return crc

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        if self._missing:
            self._abandon()
            raise ValueError(f"every tensor announced must be written (missing {', '.join(sorted(self._missing))})")
        try:
            os.ftruncate(self._file, self.length_bytes)  # a last tensor without elements writes nothing
            os.fsync(self._file)
        except BaseException:
            self._abandon()
            raise
        os.close(self._file)

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        try:
            while len(view):
                written = os.pwrite(self._file, view[:_WRITE_BYTES], offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            raise OSError(error.errno, f"{os.strerror(error.errno or 0)} at byte {offset}", str(self.path)) from error

    def _abandon(self) -> None:
        os.close(self._file)
        self.path.unlink(missing_ok=True)

"""Builds the accelerator against the torch that is installed, once for each state of its sources.

python -m tests.accelerator.build
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent.parent.parent / "build" / "accelerator"


def library() -> Path:
    """Returns the path of the shared library, which is built first where there is none yet: that takes a minute.

    Raises RuntimeError with the compiler's words.
    """
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    told = [torch.__version__.encode(), sys.version.encode(), *texts]
    built = BUILT / hashlib.sha256(b"\0".join(told)).hexdigest()[:16] / "libsoft.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of pytest-xdist begin together
        if not built.exists():
            built.parent.mkdir(exist_ok=True)
            partial = built.with_suffix(".partial")
            _compile(partial, [*include_paths(), sysconfig.get_paths()["include"]], library_paths())
            partial.rename(built)
    return built


def _compile(target: Path, includes: list[str], libraries: list[str]) -> None:
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-Wall"),
        *(f"-I{path}" for path in includes),
        *(str(SOURCES / "accelerator.cpp"), "-o", str(target)),
        *(flag for path in libraries for flag in (f"-L{path}", f"-Wl,-rpath,{path}")),
        *("-ltorch_cpu", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the accelerator in software could not be built:\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    library()

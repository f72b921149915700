"""Builds ``stronghold._C`` from ``csrc/``, with pybind11's headers and without PyTorch's."""

import sys
from glob import glob
from importlib.util import find_spec

from setuptools import Extension, setup

# No -march: the kernels choose the instruction set when they run. No contraction into fused multiply-adds:
# every instruction set computes the same bits. No errno from sqrt: it keeps a loop from being vectorised.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]

# pip brings pybind11 for the build. Where it was told to take what is there, PyTorch's copy of the headers does too,
# and compiles one file after the other.
if find_spec("pybind11"):
    from pybind11.setup_helpers import ParallelCompile

    ParallelCompile("STRONGHOLD_BUILD_JOBS").install()
HEADERS = [f"{spec.submodule_search_locations[0]}/include" for spec in map(find_spec, ("pybind11", "torch")) if spec]

setup(
    ext_modules=[
        Extension(
            "stronghold._C",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            include_dirs=["csrc", *HEADERS[:1]],
            language="c++",
            extra_compile_args=["-std=c++17", "-fvisibility=hidden", "-g0", *FLAGS, "-pthread"],
            extra_link_args=["-pthread", *(["-ldl"] if sys.platform == "linux" else [])],
        )
    ]
)

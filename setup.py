"""Builds ``stronghold._C`` from ``csrc/``, with pybind11 and without PyTorch."""

from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup

# No -march: the kernels choose the instruction set when they run. No contraction into fused multiply-adds:
# every instruction set computes the same bits. No errno from sqrt: it keeps a loop from being vectorised.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]

setup(
    ext_modules=[
        Pybind11Extension(
            "stronghold._C",
            sorted(glob("csrc/*.cpp")),
            depends=sorted(glob("csrc/*.h")),
            include_dirs=["csrc"],
            cxx_std=17,  # brings -std=c++17 and -fvisibility=hidden
            extra_compile_args=[*FLAGS, "-pthread"],
            extra_link_args=["-pthread"],
        )
    ]
)

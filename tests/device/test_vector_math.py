"""The vector functions' kernels are found by one thread: torch.cos and others, seen from outside."""

import subprocess
import sys

import pytest

CALLS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Note(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in args:
            if isinstance(tensor, torch.Tensor):
                print("CALL", function.overloadpacket.__name__, tensor.dtype, tensor.numel(), tensor.device.type)
        return function(*args, **(kwargs or {}))

with Note():
    import stronghold
"""


@pytest.fixture(scope="module")
def calls():
    """What importing the program calls, with which dtypes and how many elements."""
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("CALL")]


# Those of rotary embeddings, activations, softmax, losses, norms and initialisers.
@pytest.mark.parametrize("function", ["cos", "sin", "exp", "tanh", "erf", "log", "sqrt", "erfinv", "log1p", "expm1"])
@pytest.mark.parametrize("dtype", ["torch.float32", "torch.float64"])
def test_importing_the_program_calls_each_function_in_one_thread(calls, function, dtype):
    elements = [int(call[2]) for call in calls if call[:2] == [function, dtype] and call[3] == "cpu"]
    assert elements and elements[0] < 2048  # PyTorch gives a second thread its part from there on

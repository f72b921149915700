import subprocess
import sys

PROGRAM = """
import atexit, tempfile
import torch
import torch.distributed as dist
from stronghold.distributed.gloo_threads import wait_for_gloo

atexit.register(wait_for_gloo)
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
for _ in range(1000):
    dist.all_reduce(torch.ones(1), async_op=True)
"""


def test_a_process_ends_cleanly_whose_collectives_are_hardly_over():
    """A thread of gloo let go of a tensor while the interpreter ended: SIGABRT, in two of three such processes."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")

"""What the process keeps of what tensors free, while a model is trained on the CPU."""

import ctypes
import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="another C library")

KEEPS = """
    import ctypes, gc, sys
    import torch
    from torch import nn
    import stronghold
    from stronghold.device.heap import keep_freed_memory

    class Owner:
        pass

    class MallInfo(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_int) for name in names.split()]

    libc = ctypes.CDLL(None)
    libc.mallinfo.restype = MallInfo

    def keeps():
        '''Returns whether a large tensor lay in the heap, not in a mapping of its own, and its bytes stayed there.'''
        before = libc.mallinfo()
        tensor = torch.empty(before.arena + 2**26, dtype=torch.uint8)  # whatever of the heap is free: no room for it
        held = libc.mallinfo()
        del tensor
        return held.hblks == before.hblks and libc.mallinfo().arena >= held.arena
"""


def run(code: str, *arguments: object) -> None:
    """Runs ``code`` in a process of its own: in this one there may be models of other tests."""
    program = textwrap.dedent(KEEPS) + textwrap.dedent(code)
    own = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_freed_is_kept_while_one_of_the_owners_lives():
    run("""
        assert not keeps()
        one, other = Owner(), Owner()
        keep_freed_memory(one)
        keep_freed_memory(other)
        assert keeps()
        del one
        assert keeps()
        del other
        assert not keeps()
    """)


def test_an_optimizer_that_is_there_to_be_fast_keeps_it(tmp_path):
    run(
        """
        for update, store, kept in (
            ("deferred", "ram", True), ("in_backward", "ram", False), ("deferred", sys.argv[1], False)
        ):
            model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
            stronghold.offload(model, device="cpu", store=store)
            optimizer = stronghold.AdamW(model.parameters(), lr=1e-3, update=update)
            assert keeps() == kept, (update, store)
            del optimizer
            gc.collect()
            assert not keeps(), (update, store)
        """,
        tmp_path / "store",
    )

"""Files that may be no longer than a limit: what a full disk is to who writes, without one."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def short_files(length_bytes: int) -> Iterator[None]:
    """Has files be no longer than so many bytes, in this process and its children."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)

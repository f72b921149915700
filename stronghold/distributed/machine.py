"""Which machine a process is on."""

from __future__ import annotations

import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Where Linux tells one machine that runs from another, whatever they are called."""


def this_machine() -> tuple[str, str]:
    """Returns the machine's name, and what no other one of that name has."""
    return socket.gethostname(), BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""

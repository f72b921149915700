"""One machine is told from another."""

from __future__ import annotations

import socket

from stronghold.distributed import machine


def test_machines_of_one_name_are_told_apart(tmp_path, monkeypatch):
    first = machine.this_machine()
    assert first == machine.this_machine() and first[0] == socket.gethostname()
    (tmp_path / "boot_id").write_text("other\n")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "boot_id")
    assert machine.this_machine() == (first[0], "other")
    monkeypatch.setattr(machine, "BOOT_ID", tmp_path / "none")
    assert machine.this_machine() == (first[0], "")

"""Nothing is saved over a mount point; each is a real one, of a process with mounts of its own."""

from __future__ import annotations

import ctypes
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stronghold
from stronghold.checkpoint.pretrained import check_save_folder
from stronghold.checkpoint.saving import _check_new
from stronghold.formats.mounts import is_mount_point
from stronghold.lab.outputs import check_save

_NEW_USER, _NEW_MOUNTS, _BIND = 0x10000000, 0x00020000, 4096


def _mount(kind: str, folder: Path, source: Path) -> bool:
    """Mounts ``folder`` for this process alone; returns whether it may."""
    libc, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        return False
    for name, text in ("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1"):
        Path("/proc/self", name).write_text(text)
    if kind == "tmpfs":
        return not libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, None)
    return not libc.mount(os.fsencode(source), os.fsencode(folder), None, _BIND, None)


def with_mount(kind: str, folder: Path, source: Path, run: Callable[[], None]) -> None:
    """Has a child of this process mount ``folder`` for itself and call ``run``."""
    process = os.fork()
    if not process:
        code = 1
        try:
            code = 0 if _mount(kind, folder, source) else 77
            if not code:
                code = 1
                run()
                code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if code == 77:
        pytest.skip("this system lets no process have mounts of its own")
    assert not code


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
@pytest.mark.parametrize("through", ["itself", "a link"])
def test_a_mount_point_is_refused_before_anything_is_written(tmp_path: Path, kind: str, through: str) -> None:
    mounted, source = tmp_path / "a volume", tmp_path / "source"
    mounted.mkdir()
    source.mkdir()
    folder = tmp_path / "link" if through == "a link" else mounted
    if through == "a link":
        folder.symlink_to(mounted)
    model = nn.Linear(3, 2)
    told = r"must not be a mount point \(got '.*(volume|link)'\); pass a folder in it, such as '.*(volume|link)/model'"

    def run() -> None:
        before = sorted(os.listdir(tmp_path))
        for save in (
            lambda: stronghold.save(model, folder),
            lambda: check_save_folder(folder),
            lambda: check_save(folder, folders=[], files=[]),
            lambda: _check_new(Path(os.path.realpath(folder))),
        ):
            with pytest.raises(ValueError, match=told):
                save()
        assert sorted(os.listdir(tmp_path)) == before
        assert not os.listdir(folder)
        check_save(folder / "model", folders=[], files=[])
        stronghold.save(model, folder / "model")
        saved = load_file(folder / "model" / "model.safetensors")
        assert torch.equal(saved["weight"], model.weight) and torch.equal(saved["bias"], model.bias)

    with_mount(kind, mounted, source, run)
    assert not is_mount_point(mounted)  # here
    assert not is_mount_point(tmp_path / "new")

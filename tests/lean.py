"""An environment with the library's own dependencies alone: what pip would install, and nothing else."""

from __future__ import annotations

import importlib.metadata as metadata
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def dependencies() -> list[str]:
    """Returns the names of what pyproject.toml has the library depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [_name(requirement) for requirement in project["dependencies"]]


def make(folder: Path) -> Path:
    """Fills ``folder`` with links to those of the installed packages that the dependencies bring; returns it."""
    waiting, done = dependencies(), set()
    while waiting:
        if (name := waiting.pop()) in done:
            continue
        done.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # a requirement under a condition that is not met here
            continue
        waiting += [_name(one) for one in found.requires or () if "extra ==" not in one]
        for top in {Path(file).parts[0] for file in found.files or () if ".." not in Path(file).parts}:
            if not (folder / top).exists():
                (folder / top).symlink_to(Path(str(found.locate_file(top))))
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the standard library, ``folder`` and this tree, and nothing else of what is installed."""
    standard = [sysconfig.get_path("stdlib"), str(Path(sysconfig.get_path("stdlib")) / "lib-dynload")]
    path = ":".join([str(ROOT), str(folder)])
    start = f"import sys; sys.path[:] = {[*path.split(':'), *standard]!r}; "
    return subprocess.run(
        [sys.executable, "-S", "-E", "-c", start + arguments[0], *arguments[1:]],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "2"},
        cwd=folder,
    )


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0]

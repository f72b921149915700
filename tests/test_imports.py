"""Who may know whom: DESIGN's rooms, read from the source by ast, so that no import has to run."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stronghold

ROOMS = {
    "errors": 0,
    "layout": 0,
    "planned": 1,
    "tables": 0,
    "reports": 2,
    "spans": 0,
    "step_times": 1,
    "units": 0,
    "version": 0,
    "settings": 1,
    "native": 1,
    "split": 1,
    "weights": 3,
    "formats": 2,
    "device": 1,
    "schedule": 2,
    "unit": 2,
    "store": 3,
    "optim": 3,
    "planner": 3,
    "window": 4,
    "probing": 4,
    "engine": 5,
    "checkpoint": 6,
    "distributed": 6,
    "trainer": 7,
}
LAB = {
    "outputs": 0,
    "command": 0,
    "models": 0,
    "real_paths": 0,
    "settings": 1,
    "stops": 1,
    "records": 1,
    "data": 1,
    "cases": 2,
    "page": 3,
    "receipt": 2,
    "planning": 5,
    "methods": 2,
    "run_checkpoints": 2,
    "run_folder": 0,
    "training": 3,
    "comparison": 4,
    "finetuning": 4,
    "cli": 6,
}
"""The lab imports every room of the library, and its own as these numbers say; the library imports none of them."""
ROOMS |= {f"lab.{name}": 10 + number for name, number in LAB.items()}
EXEMPT = {"__init__.py", "__main__.py"}  # the public face and the way in: above every room
# Records only, never the engine.
RECORDS_MAY_IMPORT = {"reports", "step_times", "errors", "spans", "units", "lab.outputs", "lab.command", "lab.settings"}
READS_RECORDS = {"lab.records", "lab.page", "lab.cases"}
BELOW_THE_ENGINE = {"native", "device", "unit", "store", "optim", "window"}
PURE = {"schedule", "planner"}  # decisions over numbers, without torch
MAY_READ_ENVIRONMENT = {
    "lab.cli",
    "__main__",
    "distributed",
}  # torchrun speaks to its processes by the environment alone


def room_of(parts: list[str]) -> str:
    """Returns the room of a dotted name or a path, both without ``stronghold``."""
    return ".".join(parts[: 2 if parts[0] == "lab" else 1]).removesuffix(".py")


def imported_modules(tree: ast.AST, package: list[str]) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of everything that a file of ``package`` imports, wherever it does so.

    ``from a import b`` yields ``a.b``: ``b`` may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that read the environment; ``os.environ.update``, for a library that reads it, only writes."""
    names = {"environ", "environb", "getenv", "getenvb"}
    writes = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n.attr == "update"}
    for node in ast.walk(tree):
        if id(node) in writes:
            continue
        if (isinstance(node, ast.Attribute) and node.attr in names and getattr(node.value, "id", "") == "os") or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and any(alias.name in names for alias in node.names)
        ):
            yield node.lineno


def calls_up(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that ask something of a unit's owner."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Attribute, ast.Name)):
            name = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
            if name in ("owner", "_owner", "engine", "_engine"):
                yield node.lineno


def fields_set(tree: ast.AST) -> Iterator[int]:
    """Yields the lines that set a field of an engine."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else targets
        for target in targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value).split(".")[-1] in ("engine", "_engine"):
                yield node.lineno


def violations(root: Path) -> list[str]:
    """Returns what breaks the rules in the package at ``root``, one line per import, in order."""
    found = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(relative))
        room = room_of([*relative.parts])
        if room not in MAY_READ_ENVIRONMENT:
            found += [f"{relative}:{line} reads the environment" for line in environment_reads(tree)]
        if room in BELOW_THE_ENGINE:
            found += [f"{relative}:{line} calls up into the engine" for line in calls_up(tree)]
        if room in ROOMS and not room.startswith("lab."):
            found += [f"{relative}:{line} sets a field of the engine" for line in fields_set(tree)]
        package = ["stronghold", *relative.parts[:-1]]
        for line, name in imported_modules(tree, package):
            if "_C" in name.split(".") and name.startswith("stronghold.") and room != "native":
                found.append(f"{relative}:{line} imports _C, which is native's alone")
        if str(relative) in EXEMPT or room == "lab.__init__":
            continue
        if room not in ROOMS:
            found.append(f"{relative} is in no room")
            continue
        for line, name in imported_modules(tree, package):
            top, _, rest = name.partition(".")
            if top == "torch" and room in PURE:
                found.append(f"{relative}:{line} imports torch into {room}, which is pure")
            if top != "stronghold" or rest.split(".")[0] == "_C":
                continue
            target = room_of(rest.split("."))
            if target not in ROOMS:
                if room != "lab.cli":
                    found.append(f"{relative}:{line} imports the public face ({name}), which is above it")
            elif target != room and ROOMS[target] >= ROOMS[room]:
                found.append(f"{relative}:{line} (room {ROOMS[room]}) imports {target} (room {ROOMS[target]})")
            elif room in READS_RECORDS and target not in RECORDS_MAY_IMPORT | READS_RECORDS:
                found.append(f"{relative}:{line} imports {target} into {room}, which reads records only")
    return list(dict.fromkeys(found))  # one line may import several names


def test_every_file_imports_downwards():
    assert violations(Path(stronghold.__file__).parent) == []


def test_no_file_and_no_class_of_the_library_has_the_name_of_another():
    root = Path(stronghold.__file__).parent
    names: dict[str, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if relative.parts[0] == "lab" or path.name.startswith("__"):
            continue
        names.setdefault(path.name, []).append(str(relative))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names.setdefault(f"class {node.name}", []).append(str(relative))
    assert {name: places for name, places in names.items() if len(places) > 1} == {}


LONGER = {
    "checkpoint/loading.py",
    "checkpoint/pretrained.py",
    "distributed/watch.py",
    "engine/block.py",
    "engine/engine.py",
    "formats/content.py",
    "formats/dcp.py",
    "native/disk_io.py",
    "schedule.py",
    "store/disk.py",
    "store/unit_file.py",
    "unit/unit.py",
    "weights.py",
    "window/gradients.py",
}
"""Files that are one thing and take more room: none is added without a reason, and none grows beyond 480 lines."""


def test_files_of_the_library_are_short():
    root = Path(stronghold.__file__).parent
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py") if "lab" not in path.parts}
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    assert {name for name, count in lines.items() if count > 300} == LONGER
    assert max(lines.values()) <= 480


OTHERS = [
    "accelerate",
    "datasets",
    "matplotlib",
    "peft",
    "rich",
    "tensorboard",
    "tokenizers",
    "transformers",
    "triton",
    "trl",
]


FROM_TRANSFORMERS = {
    "transformers.conversion_mapping.get_model_conversion_mapping",
    "transformers.core_model_loading.WeightConverter",
    "transformers.core_model_loading.WeightRenaming",
    "transformers.core_model_loading.dot_natural_key",
    "transformers.core_model_loading.rename_source_key",
    "transformers.integrations.is_wandb_available",
    "transformers.quantizers.quantizer_torchao.TorchAoHfQuantizer",
    "transformers.trainer_callback.ExportableState",
    "transformers.trainer_utils.PREFIX_CHECKPOINT_DIR",
    "transformers.training_args.ParallelMode",
    "transformers.utils.logging",
}
"""What transformers has from 5.0 to 5.23, below its front door, where it keeps what comes and goes."""


def test_of_the_insides_of_transformers_only_that_is_imported_which_all_its_versions_have():
    root = Path(stronghold.__file__).parent
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")]
    names = {name for tree in trees for _, name in imported_modules(tree, ["stronghold"])}
    assert {name for name in names if name.startswith("transformers.") and name.count(".") > 1} == FROM_TRANSFORMERS


def test_the_library_imports_none_of_the_packages_that_only_some_of_it_uses():
    script = "import sys, torch, stronghold; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "stronghold" in loaded
    assert not set(loaded) & set(OTHERS)


GOOD = {
    "__init__.py": "from stronghold.engine import offload\nfrom stronghold import trainer",
    "__main__.py": "import os\nfrom stronghold.lab.cli import main\nprint(os.environ)",
    "errors.py": "import os\nos.cpu_count()",
    "native/__init__.py": "from stronghold.native.kernels import adamw",
    "native/kernels.py": "import torch\nfrom stronghold import _C",
    "native/disk.py": "from stronghold.errors import DiskError\nfrom .. import _C",
    "schedule.py": "from collections import deque\nfrom stronghold.errors import StrongholdError",
    "store/__init__.py": "from .ram import Ram",
    "store/ram.py": "from stronghold.store.store import Base\nfrom . import base\nfrom ..native import adamw",
    "store/base.py": "import torch",
    "lab/__init__.py": "",
    "lab/records/tables.py": "from stronghold import units\nfrom ..command import run_command",
    "lab/training.py": "import os\nfrom stronghold.lab.models.gpt import GPT\nos.environ.update(A='1')",
    "lab/comparison.py": "from stronghold.engine import offload\nfrom stronghold.lab.training import train",
    "lab/cli/train.py": "import os, stronghold\nfrom stronghold import __version__\nos.environ['A']",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_tree_that_keeps_the_rules_passes(tmp_path):
    assert violations(plant(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("window.py", "import stronghold.engine", "window.py:1 (room 4) imports engine (room 5)"),
        (
            "window.py",
            "def f():\n    from .engine import x",
            "window.py:2 (room 4) imports engine (room 5)",
        ),
        ("errors.py", "from stronghold import units", "errors.py:1 (room 0) imports units (room 0)"),
        ("store/disk.py", "from ..optim import AdamW", "store/disk.py:1 (room 3) imports optim (room 3)"),
        ("store/disk.py", "from .. import window", "store/disk.py:1 (room 3) imports window (room 4)"),
        (
            "device/cuda.py",
            "import stronghold",
            "device/cuda.py:1 imports the public face (stronghold), which is above it",
        ),
        (
            "lab/training.py",
            "from stronghold import AdamW",
            "lab/training.py:1 imports the public face (stronghold.AdamW), which is above it",
        ),
        ("optim/adamw.py", "self._owner.step()", "optim/adamw.py:1 calls up into the engine"),
        ("unit/unit.py", "def f(unit):\n    unit.owner.wait()", "unit/unit.py:2 calls up into the engine"),
        ("trainer.py", "engine.closed = True", "trainer.py:1 sets a field of the engine"),
        ("engine/adamw.py", "self._engine.closed |= True", "engine/adamw.py:1 sets a field of the engine"),
        ("helpers.py", "", "helpers.py is in no room"),
        ("utils/io.py", "", "utils/io.py is in no room"),
        (
            "store/ram.py",
            "from stronghold import _C",
            "store/ram.py:1 imports _C, which is native's alone",
        ),
        ("store/ram.py", "import stronghold._C", "store/ram.py:1 imports _C, which is native's alone"),
        ("store/native.py", "from .. import _C", "store/native.py:1 imports _C, which is native's alone"),
        (
            "__init__.py",
            "from stronghold._C import adamw",
            "__init__.py:1 imports _C, which is native's alone",
        ),
        ("schedule.py", "import torch", "schedule.py:1 imports torch into schedule, which is pure"),
        ("planner/cost.py", "import torch", "planner/cost.py:1 imports torch into planner, which is pure"),
        ("schedule.py", "from torch.nn import Module", "schedule.py:1 imports torch into schedule, which is pure"),
        (
            "window.py",
            "from stronghold.lab.models import gpt",
            "window.py:1 (room 4) imports lab.models (room 10)",
        ),
        (
            "store/ram.py",
            "from ..lab.models import gpt",
            "store/ram.py:1 (room 3) imports lab.models (room 10)",
        ),
        (
            "trainer.py",
            "from stronghold import lab",
            "trainer.py:1 imports the public face (stronghold.lab), which is above it",
        ),
        ("lab/tables.py", "", "lab/tables.py is in no room"),
        (
            "lab/records/tables.py",
            "from ..cli import main",
            "lab/records/tables.py:1 (room 11) imports lab.cli (room 16)",
        ),
        (
            "lab/records/tables.py",
            "from stronghold.native import adamw",
            "lab/records/tables.py:1 imports native into lab.records, which reads records only",
        ),
        (
            "lab/page/tables.py",
            "from stronghold.lab.models.gpt import GPT",
            "lab/page/tables.py:1 imports lab.models into lab.page, which reads records only",
        ),
        ("lab/training.py", "import os\nos.environ.get('A')", "lab/training.py:2 reads the environment"),
        ("trainer.py", "import os\nos.getenv('A')", "trainer.py:2 reads the environment"),
        ("native/kernels.py", "from os import environ", "native/kernels.py:1 reads the environment"),
        ("__init__.py", "import os\nprint(os.environ)", "__init__.py:2 reads the environment"),
    ],
)
def test_a_tree_that_breaks_one_rule_is_told_which(tmp_path, name, text, message):
    assert violations(plant(tmp_path, GOOD | {name: text})) == [message]

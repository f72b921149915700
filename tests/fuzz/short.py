"""Everything that a printed program names: ``from tests.fuzz.short import *``."""

from tests.fuzz.memory import Held, Hold, Write
from tests.fuzz.models import Model
from tests.fuzz.operation import (
    Accumulate,
    Backward,
    Clip,
    Evaluate,
    Explode,
    Forward,
    Gradient,
    Step,
    Train,
    ZeroGrad,
)
from tests.fuzz.programs import Program
from tests.fuzz.running import run
from tests.fuzz.states import (
    AddGroup,
    Checkpoint,
    Copy,
    Freeze,
    Group,
    Hook,
    Load,
    Look,
    Mode,
    Restore,
    Save,
    Schedule,
    Switch,
    To,
)
from tests.fuzz.twin import Way

__all__ = [
    "Accumulate",
    "AddGroup",
    "Backward",
    "Checkpoint",
    "Clip",
    "Copy",
    "Evaluate",
    "Explode",
    "Forward",
    "Freeze",
    "Gradient",
    "Group",
    "Held",
    "Hold",
    "Hook",
    "Load",
    "Look",
    "Mode",
    "Model",
    "Program",
    "Restore",
    "Save",
    "Schedule",
    "Step",
    "Switch",
    "To",
    "Train",
    "Way",
    "Write",
    "ZeroGrad",
    "check",
]


def check(program: Program) -> None:
    """Runs a program; raises AssertionError with what was wrong first."""
    failure = run(program)
    assert failure is None, f"{failure.kind} {failure.place}: {failure.message} (at {failure.where})"

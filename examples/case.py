"""What the caseN_draw.py do: the tree that they are in, whatever is installed, and its way in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stronghold.lab.cases.__main__ import main

__all__ = ["main"]

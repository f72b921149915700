#!/usr/bin/env python
"""Draws one of the paper's five cases: case.py N. The caseN_draw.py are links to this file; --help tells how."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the tree that it is in, whatever is installed

from stronghold.lab.cases.__main__ import main

if __name__ == "__main__":
    named = re.fullmatch(r"case(\d)_draw\.py", Path(sys.argv[0]).name)
    if code := main(["draw", *(named.groups() if named else ()), *sys.argv[1:]]):
        sys.exit(code)

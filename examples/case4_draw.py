#!/usr/bin/env python
"""Draws case 4; --help tells how."""

import sys

from case import main

if code := main(["draw", "4", *sys.argv[1:]]):
    sys.exit(code)

#!/usr/bin/env python
"""Draws case 1; --help tells how."""

import sys

from case import main

if code := main(["draw", "1", *sys.argv[1:]]):
    sys.exit(code)

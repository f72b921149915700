#!/usr/bin/env python
"""Draws case 3; --help tells how."""

import sys

from case import main

if code := main(["draw", "3", *sys.argv[1:]]):
    sys.exit(code)

#!/usr/bin/env python
"""Draws case 2; --help tells how."""

import sys

from case import main

if code := main(["draw", "2", *sys.argv[1:]]):
    sys.exit(code)

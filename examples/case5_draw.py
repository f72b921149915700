#!/usr/bin/env python
"""Draws case 5; --help tells how."""

import sys

from case import main

if code := main(["draw", "5", *sys.argv[1:]]):
    sys.exit(code)

"""Measures the machine that this process runs on, and keeps what it found."""

from stronghold.probing.kept_machines import kept_machine
from stronghold.probing.operator_speed import DTYPES
from stronghold.probing.probe import glance, probe
from stronghold.probing.this_machine import facts_of

__all__ = ["DTYPES", "facts_of", "glance", "kept_machine", "probe"]

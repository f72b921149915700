"""Measures the machine that this process runs on, and keeps what it found."""

from stronghold.probing.kept_machines import directory_there, disk_of, kept_machine
from stronghold.probing.operator_speed import DTYPES
from stronghold.probing.probe import glance, probe
from stronghold.probing.this_machine import facts_of, fp32_products

__all__ = ["DTYPES", "directory_there", "disk_of", "facts_of", "fp32_products", "glance", "kept_machine", "probe"]

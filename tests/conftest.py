"""Which tests run: those of DeepSpeed by ``--baselines`` alone, and then no others. None fails for being slow.

The files that take minutes begin first, so that at the end no process of pytest-xdist waits for another's.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# An example takes what other processes leave it of a core: its time says nothing of the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

TESTS = Path(__file__).parent
LONG = (
    "distributed/test_exact.py",
    "distributed/test_faults.py",
    "test_notebook.py",
    "distributed/test_checkpoints.py",
    "distributed/test_training.py",
    "examples/",
    "checkpoint/",
    "test_equivalence.py",
    "test_bitwise.py",
    "test_benchmarks_",
    "test_ordering.py",
    "engine/",
)


def pytest_addoption(parser):
    parser.addoption("--baselines", action="store_true", help="run the tests that need DeepSpeed, and only those")


def place(item):
    """Returns how early ``item`` is to begin."""
    path = item.path.relative_to(TESTS).as_posix()
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))


def pytest_collection_modifyitems(config, items):
    items.sort(key=place)
    baselines = [item for item in items if item.get_closest_marker("baselines")]
    if config.getoption("--baselines"):
        config.hook.pytest_deselected(items=[item for item in items if item not in baselines])
        items[:] = baselines
        return
    for item in baselines:
        item.add_marker(pytest.mark.skip(reason="needs DeepSpeed: ./test.sh --baselines"))

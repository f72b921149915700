"""Which tests run: those of DeepSpeed by ``--baselines`` alone, and then no others. None fails for being slow."""

import pytest
from hypothesis import HealthCheck, settings

# An example takes what other processes leave it of a core: its time says nothing of the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


def pytest_addoption(parser):
    parser.addoption("--baselines", action="store_true", help="run the tests that need DeepSpeed, and only those")


def pytest_collection_modifyitems(config, items):
    baselines = [item for item in items if item.get_closest_marker("baselines")]
    if config.getoption("--baselines"):
        config.hook.pytest_deselected(items=[item for item in items if item not in baselines])
        items[:] = baselines
        return
    for item in baselines:
        item.add_marker(pytest.mark.skip(reason="needs DeepSpeed: ./test.sh --baselines"))

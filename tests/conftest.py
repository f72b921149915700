"""Which tests run: those of DeepSpeed by ``--baselines`` alone, and then no others. None fails for being slow.

Those marked ``gpu`` run on a GPU where there is one. Where there is none they run on the accelerator in software, in a
process of their own: with ``--accelerator``, or asked for by ``-m gpu``.

The files that take minutes begin first, so that at the end no process of pytest-xdist waits for another's.
"""

import gc
from contextlib import suppress
from pathlib import Path

import pytest
import torch

with suppress(ModuleNotFoundError):  # the tests of a GPU do without
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
    parser.addoption("--accelerator", action="store_true", help="run those of a GPU on one in software, and only those")


def pytest_configure(config):
    config.option.accelerator |= config.option.markexpr.startswith("gpu") and not torch.cuda.is_available()
    if config.option.accelerator:
        import tests.accelerator.host  # noqa: F401  (the device is known from here on)


@pytest.fixture(autouse=True, scope="module")
def _imports_are_not_searched():
    """Has collections of garbage, of which tests make many, pass over what has been imported: they take 0.3 s else."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _no_races(request):
    """Checks each test of a GPU for missing waits, where the device can see them."""
    from tests.gpu import SOFT  # known once the device is

    if SOFT is None or request.node.get_closest_marker("gpu") is None:
        yield
        return
    with SOFT.checked() as races:
        yield
    assert races == []


@pytest.fixture(autouse=True)
def _classes_of_tensors_are_asked():
    """Without, parameters would not wait for their updates, in this test and in all behind it."""
    yield
    assert torch._C._is_torch_function_enabled(), "something has left DisableTorchFunctionSubclass in the middle"


def place(item):
    """Returns how early ``item`` is to begin."""
    path = item.path.relative_to(TESTS).as_posix()
    return next((place for place, name in enumerate(LONG) if path.startswith(name)), len(LONG))


def pytest_collection_modifyitems(config, items):
    items.sort(key=place)
    if config.option.accelerator:
        on_device = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=[item for item in items if item not in on_device])
        items[:] = on_device
    baselines = [item for item in items if item.get_closest_marker("baselines")]
    if config.getoption("--baselines"):
        config.hook.pytest_deselected(items=[item for item in items if item not in baselines])
        items[:] = baselines
        return
    for item in baselines:
        item.add_marker(pytest.mark.skip(reason="needs DeepSpeed: ./test.sh --baselines"))

"""What is said to fit does: random models under random caps of a device's memory, each run for real."""

import pytest

from tests.crossed import seeds
from tests.gpu import needs_soft


@pytest.mark.gpu
@needs_soft
@pytest.mark.parametrize("seed", seeds(16, 6))
def test_what_is_said_to_fit_does(seed):
    from tests.fits import judged

    found = judged(seed)
    if found["said"] == "fits":
        assert found["peak"] <= found["cap"], found
    assert found["peak"] <= found["planned"], found

"""What all processes run together: where one fails, all have its error, wherever the others are by then."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launched import launch
from tests.distributed.together import PROCESSES

FAILS = {
    "before what others gather": [1],
    "between two": [2],
    "behind all": [0],
    "two at once": [1, 2],
    "within another": [1],
    "where others run another": [1],
}
"""Who fails."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("tests.distributed.together", "all_cases", PROCESSES, tmp_path_factory.mktemp("together"))


@pytest.mark.parametrize("case", FAILS)
def test_all_have_the_first_one_s_error_and_go_on_together(found: list[dict[str, Any]], case: str) -> None:
    first = FAILS[case][0]
    for rank, one in enumerate(found):
        expected = f"ValueError: process {rank} cannot, True"
        if rank != first:
            expected = f"ParallelError: process {first} failed: process {first} cannot, False"
        assert one[case] == (expected, True)


def test_what_fails_nowhere_returns(found: list[dict[str, Any]]) -> None:
    assert [one["none"] for one in found] == [("[10, 11, 12]", True)] * PROCESSES

"""Which runs learned something else than the resident one: from records alone, and as the table says it."""

import io
import json
import re

import pytest
from rich.console import Console

from stronghold.lab.records.agreement import compared, comparison_notes, comparison_table, disagreements

SUMMARY = {
    "samples_per_s": 2.5, "iteration_s": 0.4, "peak_host_bytes": 3 * 2**30, "peak_device_bytes": 0,
    "device_bytes": 2**30, "disk_bytes": 0, "last_loss": 3.0,
}  # fmt: skip


def record(method, losses, *, error=None, **settings):
    settings = {"dtype": "fp32", "lr": 1e-3, "betas": [0.9, 0.95], "layers": 4, "window": 2} | settings
    ended = {"error": error} if error else {"summary": SUMMARY | {"last_loss": losses[-1]}}
    return {"settings": {"method": method, **settings}, "losses": losses, **ended}


RESIDENT = record("megatron-lm", [9.0, 5.0, 3.0])


def test_the_first_step_beyond_the_tolerance_is_told():
    near = record("l2l", [9.0, 5.0 * (1 + 0.9e-4), 3.0])
    away = record("stronghold", [9.0, 5.0 * (1 - 2e-4), 7.0])
    none, agrees, wrong = disagreements([RESIDENT, near, away])
    assert none is agrees is None
    assert (wrong.method, wrong.step, wrong.expected, wrong.tolerance) == ("stronghold", 2, 5.0, 1e-4)
    assert str(wrong) == "loss 4.9990 in step 2, megatron-lm has 5.0000 (0.0002 away, tolerance 1e-04)"


def test_bf16_is_compared_with_bf16_and_more_loosely():
    other = record("l2l", [9.0, 5.04, 3.0], dtype="bf16")
    assert disagreements([RESIDENT, other]) == [None, None]
    assert compared([RESIDENT, other]) == [True, False]
    resident = record("megatron-lm", [9.0, 5.0, 3.0], dtype="bf16")
    assert disagreements([resident, other]) == [None, None]
    assert disagreements([resident, record("l2l", [9.0, 5.06, 3.0], dtype="bf16")])[1].step == 2


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), "nan", "inf"])
def test_what_is_no_number_disagrees(loss):
    assert disagreements([RESIDENT, record("l2l", [9.0, loss])])[1].step == 2


def test_only_runs_that_learn_the_same_are_compared():
    assert disagreements([RESIDENT, record("l2l", [8.0], lr=2e-3), record("l2l", [8.0], layers=5)]) == [None] * 3
    assert disagreements([RESIDENT, record("l2l", [8.0, 5.0, 3.0], window=4)])[1].step == 1


def test_a_run_that_went_on_by_the_schedule_it_began_with_is_compared_with_such():
    earlier = record("megatron-lm", [9.0, 5.0], steps=20)  # of a version that had no other schedule
    assert compared([earlier, record("l2l", [9.0], steps=20, decay_steps=20)]) == [True, True]
    assert compared([earlier, record("l2l", [9.0], steps=20, decay_steps=10)]) == [True, False]


def test_a_record_is_the_same_before_and_after_its_file():
    here = record("megatron-lm", [9.0, 5.0, 3.0], betas=(0.9, 0.95))
    assert disagreements([json.loads(json.dumps(here)), record("l2l", [8.0], betas=(0.9, 0.95))])[1] is not None


def test_the_newest_reference_that_ended_counts():
    failed = record("megatron-lm", [1.0], error="failed: out of memory")
    found = disagreements([record("megatron-lm", [8.0, 5.0, 3.0]), RESIDENT, failed, record("l2l", [9.0, 5.0, 3.0])])
    assert [one and one.step for one in found] == [1, None, 1, None]


def test_a_run_that_failed_is_compared_as_far_as_it_came():
    assert disagreements([RESIDENT, record("l2l", [9.0], error="failed: step 2")])[1] is None
    assert disagreements([RESIDENT, record("l2l", [9.1], error="failed: step 2")])[1].step == 1


AGAIN = record("megatron-lm-exact", [9.0, 5.0 * (1 + 2e-4), 3.0])


def test_a_loss_may_be_twice_as_far_as_the_reference_in_other_rounding_has_been():
    """From the step on in which that has been so far: what is once apart stays so."""
    within = record("l2l", [9.0 * (1 + 0.9e-4), 5.0 * (1 - 3.9e-4), 3.0 * (1 + 3.9e-4)])
    beyond = record("l2l", [9.0, 5.0, 3.0 * (1 + 4.1e-4)])
    early = record("l2l", [9.0 * (1 + 2e-4), 5.0, 3.0])
    found = disagreements([RESIDENT, AGAIN, within, beyond, early])
    assert [one and one.step for one in found] == [None, None, None, 3, 1]
    assert found[3].tolerance == pytest.approx(4e-4)
    assert str(found[3]).endswith("tolerance 4e-04)")


@pytest.mark.parametrize("loss", [float("nan"), "inf"])
def test_what_is_no_number_widens_nothing_and_neither_does_what_is_missing(loss):
    for losses in ([9.0, loss, 3.0], [9.0]):
        again = record("megatron-lm-exact", losses, error="failed" if losses == [9.0] else None)
        assert disagreements([RESIDENT, again, record("l2l", [9.0, 5.0 * (1 + 2e-4), 3.0])])[2].step == 2


def test_the_other_rounding_counts_for_what_learns_the_same():
    again = record("megatron-lm-exact", [9.0, 5.1, 3.0], lr=2e-3)
    assert disagreements([RESIDENT, again, record("l2l", [9.0, 5.0 * (1 + 2e-4), 3.0])])[2].step == 2


def drawn(records):
    file = io.StringIO()
    Console(file=file, width=120).print(comparison_table(records))
    return [re.split(r"\s{2,}", line.strip()) for line in file.getvalue().splitlines()[4:] if line.strip()]


def test_the_table_has_a_line_for_each_whatever_became_of_it():
    records = [
        RESIDENT,
        record("l2l", [9.0, 5.0, 3.0]),
        record("stronghold", [9.0, 5.0, 3.3]),
        record("zero-offload", [], error="refused: zero-offload needs DeepSpeed: no"),
    ]
    assert drawn(records) == [
        ["megatron-lm", "2.5", "400 ms", "3.00 GiB", "1.00 GiB", "-", "3.0000", "the reference"],
        ["l2l", "2.5", "400 ms", "3.00 GiB", "1.00 GiB", "-", "3.0000", "agrees"],
        ["stronghold", "2.5", "400 ms", "3.00 GiB", "1.00 GiB", "-", "3.3000", "WRONG"],
        ["zero-offload", *["-"] * 6, "refused"],
    ]
    wrong, refused = comparison_notes(records)
    assert wrong.startswith("stronghold WRONG: loss 3.3000 in step 3, megatron-lm has 3.0000")
    assert refused == "zero-offload refused: zero-offload needs DeepSpeed: no"


def test_the_table_says_how_far_the_reference_is_from_itself():
    assert drawn([RESIDENT, AGAIN])[1][-1] == "in other rounding"
    assert comparison_notes([RESIDENT, AGAIN]) == [
        "megatron-lm-exact in other rounding: its losses are up to 2.0e-04 from those of megatron-lm, and in each step "
        "others may be 2 times as far as it has been"
    ]


def test_without_a_reference_the_table_says_so():
    assert drawn([record("l2l", [9.0])])[0][-1] == "not compared"

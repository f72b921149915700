"""What all processes of a model in stages take together."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from stronghold.lab.records.stages_report import StagesReport
from stronghold.step_times import PlannedStage, StageTimes
from tests.test_reports import STEP, report


def stages(*steps):
    return StagesReport(
        parameters=3000,
        reports=(
            report(layers=3, parameters=2000, peak_device_bytes=5, disk_paths=("/a",), step=steps[0]),
            report(layers=2, parameters=1500, peak_device_bytes=7, disk_paths=("/b",), step=steps[1], disk_bytes=2048),
        ),
    )


def test_bytes_are_sums():
    both = stages(STEP, STEP)
    assert both.device_bytes == 2 * report().device_bytes
    assert both.host_bytes == 2 * report().host_bytes
    assert (both.peak_device_bytes, both.disk_bytes, both.disk_paths) == (12, 2048, ("/a", "/b"))


def test_a_step_takes_as_long_as_the_slowest_process_and_computes_as_long_as_all_on_average():
    slow = replace(STEP, total_s=3.0, compute_s=2.5, fetch_wait_s=0.5, update_wait_s=0.4, disk_wait_s=0.2, fetches=6)
    step = stages(STEP, slow).step
    assert (step.total_s, step.compute_s, step.fetches) == (3.0, 2.0, 20)
    assert (step.fetch_wait_s, step.update_wait_s, step.disk_wait_s) == pytest.approx((0.4, 0.3, 0.1))
    assert (step.fetched_bytes, step.gradient_bytes) == (2 * STEP.fetched_bytes, 2 * STEP.gradient_bytes)


def test_there_is_no_step_before_all_have_taken_one():
    assert stages(STEP, None).step is None


def test_it_reads_as_a_table_with_a_sum_that_counts_shared_parameters_once():
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(stages(STEP, STEP))
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [row for row in rows if row] == [
        ["0", "3", "2 k", "4", "8.00 MiB", "1.50 GiB", "0 B"],
        ["1", "2", "1.5 k", "4", "8.00 MiB", "1.50 GiB", "2.00 KiB"],
        ["all", "5", "3 k", "", "16.0 MiB", "3.00 GiB", "2.00 KiB"],
    ]


def test_stages_have_a_line_each_with_what_was_planned_beside():
    planned = PlannedStage(computing_s=2.0, waiting_s=0.25, peak_bytes=3 * 2**20)
    first = StageTimes(stage=0, layers=3, computing_s=1.5, waiting_s=0.5, sent_bytes=2048, planned=planned)
    last = StageTimes(stage=1, layers=2, computing_s=1.75, waiting_s=0.125, sent_bytes=1024)
    both = StagesReport(
        parameters=1,
        reports=(report(stages=(last,), peak_device_bytes=2**20), report(stages=(first,), peak_device_bytes=0)),
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(both)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    assert [row for row in rows if row][-3:] == [
        ["0", "3", "measured", "1.50 s", "500 ms", "2.00 KiB", "not counted"],
        ["", "", "planned", "2.00 s", "250 ms", "", "3.00 MiB"],
        ["1", "2", "measured", "1.75 s", "125 ms", "1.00 KiB", "1.00 MiB"],
    ]
    text = str(both.reports[1])
    assert "1.50 s, planned 2.00 s" in text and "500 ms, planned 250 ms; 2.00 KiB sent" in text

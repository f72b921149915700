"""The report, line by line."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stronghold.reports import Measured, Report
from stronghold.step_times import StepTimes
from stronghold.tables import table

STEP = StepTimes(
    total_s=2.0,
    compute_s=1.5,
    fetch_wait_s=0.3,
    update_wait_s=0.2,
    disk_wait_s=0.0,
    fetches=14,
    fetched_bytes=3 * 2**30,
    gradient_bytes=2**20,
)


def report(**changes):
    values = {
        "parameters": 1_716_588_544,
        "trainable_parameters": 1_716_588_544,
        "layers": 32,
        "window": 4,
        "resident": 0,
        "states": "fp32",
        "device": "cuda:0",
        "dtype": "bfloat16",
        "slots_device_bytes": 4 * 2**20,
        "gradients_device_bytes": 2**20,
        "root_device_bytes": 3 * 2**20,
        "resident_device_bytes": 0,
        "peak_device_bytes": 0,
        "pinned_host_bytes": 2**30,
        "pageable_host_bytes": 2**29,
        "process_host_bytes": 300 * 2**20,
        "root_gradients_device_bytes": 2 * 2**20,
        "beside_host_bytes": 5 * 2**20,
        "disk_bytes": 0,
        "disk_paths": (),
        "on_root_disk": False,
        "accumulation_bytes": 2**28,
        "skipped_steps": 0,
        "step": None,
    }
    return Report(**(values | changes))


def test_sums():
    assert report().device_bytes == 8 * 2**20
    assert report().host_bytes == 3 * 2**29


def test_it_reads_as_a_table():
    assert (
        str(report())
        == """\
model   parameters         1.717 B
        layers             32, 4 at a time on cuda:0
        compute type       bfloat16
        moments            fp32
device  slots              4.00 MiB
        gradients          1.00 MiB
        root               3.00 MiB
        together           8.00 MiB
        in a step          2.00 MiB more for the root's gradients, and activations
        peak               not counted
host    pinned             1.00 GiB
        pageable           512 MiB
        together           1.50 GiB
        to accumulate      256 MiB more
        process            300 MiB more, before anything was placed
disk    layers and states  0 B"""
    )


def test_resident_layers_and_the_optimizers_absence_are_told():
    rows = report(resident=3, resident_device_bytes=2**20, states=None).rows()
    assert ("", "layers", "32, 3 resident, 4 at a time on cuda:0") in rows
    assert ("", "moments", "none yet") in rows
    assert ("", "resident layers", "1.00 MiB") in rows
    assert report(resident=3, resident_device_bytes=2**20).device_bytes == 9 * 2**20
    rows = report(resident_root=2, resident_device_bytes=2**20).rows()
    assert ("", "resident root parameters", "1.00 MiB") in rows
    rows = report(resident=3, resident_root=2, resident_device_bytes=2**20).rows()
    assert ("", "resident layers and root parameters", "1.00 MiB") in rows


def test_the_last_step_skipped_steps_and_frozen_parameters_are_told_where_there_are_any():
    text = str(report(step=STEP, skipped_steps=2, trainable_parameters=5000, peak_device_bytes=2**30))
    lines = [line.split("  ") for line in text.splitlines()]
    told = {tuple(cell.strip() for cell in line if cell.strip())[-2:] for line in lines}
    assert told >= {
        ("parameters", "1.717 B, 5 k of them trained"),
        ("peak", "1.00 GiB"),
        ("total", "2.00 s"),
        ("computing", "1.50 s (75%)"),
        ("waiting for a fetch", "300 ms (15%)"),
        ("waiting for an update", "200 ms (10%)"),
        ("waiting for disk", "0 s (0%)"),
        ("fetched", "3.00 GiB in 14 fetches"),
        ("gradients down", "1.00 MiB"),
        ("not counted", "5.00 MiB more by now"),
        ("skipped", "2, for gradients that were not finite"),
    }


def test_what_went_to_other_replicas_is_told_where_there_are_any():
    assert ("", "to replicas", "2.00 KiB") in report(step=replace(STEP, reduced_bytes=2048)).rows()


def test_rich_draws_every_line():
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report(step=STEP))
    drawn = console.export_text()
    for _, name, value in report(step=STEP).rows():
        assert any(name in line and value in line for line in drawn.splitlines()), name


def test_names_are_folded_only_where_they_leave_no_room_to_a_value():
    row, drawn = ("section", 40 * "n", 60 * "v"), []
    for width in (72, 73):
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(table("title", [row], width))
        drawn.append(console.export_text().splitlines()[2])
    assert drawn == [f"│ section │ {28 * 'n'} │ {27 * 'v'} │", f"│ section │ {40 * 'n'} │ {16 * 'v'} │"]


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_a_narrow_table_has_every_character(width):
    rows = [*report(step=STEP, disk_paths=("/mnt/" + 90 * "a",)).rows(), ("long", 40 * "n", 50 * "v")]
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("title", rows, width))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    columns = zip(*(line.strip("│").split("│") for line in lines), strict=True)
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        assert re.sub(r"\s", "", "".join(column)) == re.sub(r"\s", "", "".join(cells))


def test_a_table_has_a_line_above_each_section():
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("title", [("a", "x", "1"), ("", "y", "2"), ("b", "z", "3")], 60))
    lines = console.export_text().splitlines()
    assert [line[0] for line in lines] == ["t", "┌", "│", "│", "├", "│", "└"]


def test_a_disk_is_told_with_its_wear():
    step = StepTimes(**{**vars(STEP), "disk_read_bytes": 5 * 2**30, "disk_written_bytes": 4 * 10**9})
    there = {"disk_bytes": 2**34, "disk_paths": ("/mnt/a", "/mnt/b"), "on_root_disk": True}
    text = str(report(**there, weights_on_disk=1, states_on_disk=2, step=step))
    assert re.search(r"namely +weights of 1 and states of 2 of \d+ layers", text)
    assert re.search(r"in +/mnt/a, /mnt/b", text)
    assert re.search(r"note +this is the system's own disk", text)
    assert re.search(r"read from disk +5\.00 GiB", text)
    assert re.search(r"written to disk +3\.73 GiB, 4 TB in a thousand steps", text)
    assert "disk" not in str(report(step=STEP)).split("layers and states")[1].replace("waiting for disk", "")


def test_what_is_measured_tells_what_it_cannot_tell():
    known = {"parameters": 10**6, "device": "cpu", "dtype": "float32", "peak_device_bytes": 0, "host_bytes": 2**30}
    rows = {name: value for _, name, value in Measured(device_bytes=0, **known).rows()}
    assert rows == {
        "parameters": "1 M", "compute type": "float32", "held": "not told apart", "peak": "not counted",
        "process": "1.00 GiB",
    }  # fmt: skip
    swapping = Measured(device_bytes=2**20, disk_bytes=2**21, disk_paths=("/mnt/nvme",), **known)
    assert "held          1.00 MiB" in str(swapping)
    assert "files         2.00 MiB" in str(swapping)
    assert "/mnt/nvme" in str(swapping)


@pytest.mark.parametrize(
    "shown",
    [
        report(step=STEP, disk_bytes=2, disk_paths=("/mnt/<a>&b",)),
        Measured(parameters=1, device="<gpu>", dtype="float32", device_bytes=0, peak_device_bytes=0, host_bytes=1),
    ],
    ids=["report", "measured"],
)
def test_a_notebook_shows_a_table(shown):
    found = ElementTree.fromstring(shown._repr_html_())  # which is no HTML if a name was not escaped
    assert found.tag == "table"
    assert [tuple(cell.text or "" for cell in row) for row in found] == shown.rows()
    assert [cell.tag for cell in found[0]] == ["th", "td", "td"]

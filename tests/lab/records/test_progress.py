"""The progress bar on a terminal, and the lines elsewhere."""

import io

from rich.console import Console

from stronghold.lab.records.progress import StepDisplay


def show(terminal, steps=25, width=140):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width, color_system=None)
    with StepDisplay(console, steps) as display:
        for step in range(1, steps + 1):
            display.step(
                {
                    "step": step,
                    "loss": 10.0 / step,
                    "tokens_per_s": 1234.0,
                    "device_bytes": 2**20,
                    "peak_device_bytes": 0 if step < steps else 2**30,
                    "peak_host_bytes": 2**31,
                }
            )
    return file.getvalue()


def test_without_a_terminal_a_line_for_every_tenth_of_the_steps():
    lines = show(terminal=False).splitlines()
    assert [int(line.split("/")[0].split()[1]) for line in lines] == [1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 25]
    assert lines[0] == "step     1/25  loss 10.0000 1,234 tokens/s device 1.00 MiB host 2.00 GiB"
    assert "device 1.00 GiB" in lines[-1]


def test_what_a_step_writes_to_disk_is_shown():
    file = io.StringIO()
    with StepDisplay(Console(file=file, width=140), 1) as display:
        step = {"step": 1, "loss": 1.0, "tokens_per_s": 2.0, "device_bytes": 0, "peak_device_bytes": 0}
        display.step({**step, "peak_host_bytes": 2**31, "disk_written_bytes": 3 * 2**30})
    assert file.getvalue().rstrip().endswith("tokens/s host 2.00 GiB disk 3.00 GiB written")  # no device that has 0 B


def test_on_a_terminal_one_bar_with_the_last_values():
    last = show(terminal=True).split("\r")[-1]
    assert "25/25 ━━━" in last
    assert "loss 0.4000 1,234 tokens/s device 1.00 GiB host 2.00 GiB" in last
    assert "left" in last


def test_a_narrow_terminal_shows_every_number():
    last = show(terminal=True, width=80).split("\r")[-1]
    assert "25/25" in last
    assert "loss 0.4000 1,234 tokens/s device 1.00 GiB host 2.00 GiB" in last
    assert ":00 left" in last

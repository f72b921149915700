"""Logs of the artifact's format: read for what they say, and refused for what they do not."""

import math

import pytest

from stronghold.lab.cases.artifact import is_artifact_log, read_artifact_log
from tests.lab.cases.conftest import artifact_log

NAME = "log_stronghold_l-32_hs-2048_bs-4_ws-15_2022-07-02.1656734808.txt"


def read(tmp_path, text, name=NAME):
    return read_artifact_log(tmp_path / name, text)


def test_what_it_says_is_read(tmp_path):
    found = read(tmp_path, artifact_log())
    assert (found.method, found.layers, found.window, found.artifact) == ("stronghold", 32, 15, True)
    shape = {"hidden": 2048, "heads": 16, "sequence": 1024, "batch": 4, "dtype": "fp32"}
    assert shape.items() <= found.settings.items()
    assert found.parameters == 1_716_588_544
    assert (found.iteration_s, found.low, found.high) == (6.0, 5.9, 6.1)  # without the first ten iterations
    assert found.samples_per_s == pytest.approx(4 / 6)
    assert found.losses == (10.0,) * 4
    assert (found.wrong, found.steps, found.note) == ("", 40, "cut short after iteration 40 of 50")


@pytest.mark.parametrize(
    "method", ["megatron-lm", "l2l", "zero-offload", "zero-infinity", "zero-infinity-nvme", "stronghold"]
)
def test_the_method_is_that_of_the_printed_settings(method, tmp_path):
    found = read(tmp_path, artifact_log(method=method), "anything.txt")
    assert (found.method, found.layers, found.settings["batch"]) == (method, 32, 4)
    assert found.window == (15 if method == "stronghold" else None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", 0),
        (
            "[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.5 | max allocated: 24600.5 | reserved: 3\n",
            24600.5 * 2**20,
        ),
        ("MA 1.25 GB         Max_MA 2.5 GB         CA 3.0 GB\nMA 1.0 GB         Max_MA 1.5 GB\n", 2.5 * 2**30),
    ],
    ids=["none", "megatron", "deepspeed"],
)
def test_the_most_that_the_device_held_is_read(line, expected, tmp_path):
    assert read(tmp_path, artifact_log() + line).device_bytes == expected


def test_the_log_counts_and_not_its_name(tmp_path):
    found = read(tmp_path, artifact_log(method="l2l", layers=78, times=(1.0,) * 5), NAME)
    assert (found.method, found.layers) == ("l2l", 78)
    assert "method is l2l in the log and stronghold in its name: the log counts" in found.note
    assert "layers is 78 in the log and 32 in its name" in found.note


@pytest.mark.parametrize("letter", ["h", "hs"])
def test_a_name_alone_is_believed_and_said(letter, tmp_path):
    rates = "x SamplesPerSec=0.25\nx SamplesPerSec=0.5\nx SamplesPerSec=0.4\n"
    found = read(tmp_path, rates, f"log_zero-offload_l-48_{letter}-2048_bs-4_ws-4_2022-07-02.1.txt")
    assert (found.method, found.layers, found.window) == ("zero-offload", 48, None)
    assert (found.settings["hidden"], found.settings["batch"]) == (2048, 4)
    assert found.iteration_s == pytest.approx((8.0 + 10.0) / 2)
    assert found.note == "method, layers, hidden, batch by its name alone"


def test_a_loss_that_is_no_number_is_wrong(tmp_path):
    text = artifact_log().replace(" lm loss: 1.0E+01 |", "", 1)
    found = read(tmp_path, text)
    assert math.isnan(found.losses[0])
    assert found.wrong == "its loss is nan"


def test_a_log_cut_anywhere_is_read_or_refused_with_the_reason(tmp_path):
    whole = artifact_log()
    read_to, refused = set(), set()
    for length in range(0, len(whole), 7):
        try:
            found = read(tmp_path, whole[:length])
            read_to.add(found.steps)
            assert found.layers == 32
            assert found.iteration_s in (6.6, 6.0, 5.95)
        except ValueError as error:
            refused.add(str(error))
    assert read_to == {10, 20, 30, 40}
    assert refused == {"it was cut short before its first ten iterations, or has another format"}


@pytest.mark.parametrize("text", ["", "hello\n", "\x00\x01garbage\xff", "settings  method   stronghold\n"])
def test_any_other_text_is_told_from_it(text, tmp_path):
    assert not is_artifact_log(text)
    assert is_artifact_log(artifact_log()[:80])
    with pytest.raises(ValueError, match="neither the log nor its name says method, layers, hidden, batch"):
        read(tmp_path, text, "x.txt")


def test_an_unknown_method_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a method must be one of .* \(got 'gemini'\)"):
        read(tmp_path, "SamplesPerSec=1.0", "log_gemini_l-4_hs-64_bs-4_ws-4_2022.txt")

"""Records as measurements: today's, older ones, and those of trials."""

import math

import pytest

from stronghold.lab.cases.machines import TINY
from stronghold.lab.cases.measurement import from_record
from tests.lab.cases.conftest import make_record, make_trial


def test_a_runs_record_is_read():
    found = from_record(make_record(layers=3, window=2, seconds=0.5), "here")
    assert (found.source, found.method, found.layers, found.window, found.parameters) == (
        "here", "stronghold", 3, 2, 3000,
    )  # fmt: skip
    assert (found.iteration_s, found.low, found.high, found.samples_per_s) == (0.5, 0.45, 0.6, 4.0)
    assert (found.losses, found.device_bytes, found.host_bytes) == ((6.5, 6.25), 1000, 3000)
    assert (found.machine, found.commit, found.wrong) == ("Some CPU, 2 cores, 8.00 GiB", "a" * 40, "")
    assert found.has(TINY.shape)


def test_a_window_is_strongholds_alone_and_a_number():
    assert from_record(make_record("l2l", window=7), "x").window is None
    assert from_record(make_record(window="auto"), "x").window is None


@pytest.mark.parametrize("changed", [{"store": "/disk"}, {"states": "8bit"}, {"hidden": 65}, {"path": "a/model"}])
def test_other_settings_are_no_cases(changed):
    assert not from_record(make_record(settings=changed), "x").has(TINY.shape)


def test_what_an_older_record_lacks_is_as_usual():
    record = make_record()
    del record["settings"]["heads"], record["summary"]["iteration_s_p10"]
    found = from_record(record, "x")
    assert found.has(TINY.shape)
    assert (found.low, found.high) == (0.5, 0.6)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            {"benchmark": "adamw", "ns": 1.0},
            "it has no settings and no summary: a record of another or an older format",
        ),
        (make_record() | {"summary": None}, "it has no summary: a record of another or an older format"),
        (make_record() | {"summary": {"steps": 3}}, "its summary has no iteration_s: a record of an older format"),
        (make_record(settings={"layers": None}), "its settings have no layers"),
        (make_record(settings={"batch": None}), "its settings have no batch"),
        (make_record(seconds=0.0), r"its iterations must take time \(got iteration_s=0.0\)"),
        (make_record(losses=[3.0, "x"]), "its losses are no numbers"),
        (make_record(limits={"bytes": 1}), "its limits are not those of device and host"),
        (make_record("gemini"), r"a method must be one of megatron-lm, .* \(got 'gemini'\); correct its name"),
    ],
)
def test_any_other_record_is_refused_with_the_reason(broken, message):
    with pytest.raises(ValueError, match=message):
        from_record(broken, "x")


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_a_loss_that_is_no_number_is_wrong(loss):
    found = from_record(make_record(summary={"last_loss": loss}), "x")
    assert found.wrong == f"its loss is {float(loss)}"


def test_a_trial_that_did_not_train_has_no_times():
    record = make_trial(reason="over the limit of memory")
    del record["summary"]
    found = from_record(record, "x")
    assert (found.reason, found.steps) == ("over the limit of memory", 0)
    assert math.isnan(found.iteration_s)
    assert found.limits.host_bytes == TINY.host_limit

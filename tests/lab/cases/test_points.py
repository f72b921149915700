"""What belongs to a case, by settings alone, and the numbers that it shows."""

from dataclasses import replace

import pytest

from stronghold.lab.cases.artifact import read_artifact_log
from stronghold.lab.cases.case import CASES, Wanted
from stronghold.lab.cases.machines import CPU, TINY, V100
from stronghold.lab.cases.points import layers_of_largest, machines_of, missing_runs, show, table_of
from tests.lab.cases.conftest import HOST, artifact_log, make_record, make_trial


def shown(number, measurements, **options):
    return show(CASES[number], TINY, measurements, **options)


def values(panel):
    return {point.wanted: point.y for point in panel.points} if panel else {}


def test_case_1_shows_each_methods_largest_that_passed(measure):
    trials = [make_trial(layers=2), make_trial(layers=4), make_trial(layers=5, reason="over the limit of memory")]
    trials += [make_trial("megatron-lm", 1, reason="ended with 1: no")]
    found = shown(1, measure(*trials, make_record(layers=9)))
    assert values(found.here) == {Wanted("megatron-lm", 0): 0, Wanted("stronghold", 4): 4000}
    assert found.notes == (
        "megatron-lm, 1 layers: ended with 1: no",
        "stronghold, 5 layers: over the limit of memory",
    )


def test_case_1_says_where_the_search_ended_before_a_model_failed(measure):
    found = shown(1, measure(make_trial(layers=TINY.most), make_trial("megatron-lm", 1)))
    assert found.notes == ("stronghold: 2 layers are the most that were tried",)


def test_case_1_takes_no_trial_under_other_limits(measure):
    other = make_trial(layers=8) | {"limits": {"device_bytes": 1, "host_bytes": 2}}
    assert values(shown(1, measure(make_trial(), other)).here) == {Wanted("stronghold", 2): 2000}


def test_case_2_is_at_each_baselines_largest_as_case_1_found_it(measure):
    trials = measure(make_trial("megatron-lm", 3), make_trial("l2l", 7, reason="late"))
    assert layers_of_largest(TINY, trials) == {"megatron-lm": 3, "stronghold": 2}
    runs = [make_record("megatron-lm", 3, seconds=0.25), make_record(layers=3, seconds=0.5)]
    runs += [make_record("megatron-lm", 2), make_record(layers=3, window=2)]  # smaller; of another window
    found = shown(2, [*trials, *measure(*runs)])
    assert values(found.here) == {
        Wanted("megatron-lm", 3, None, "megatron-lm"): 8.0,
        Wanted("stronghold", 3, 1, "megatron-lm"): 4.0,
    }
    point = found.here.points[1]
    assert (point.low, point.high) == pytest.approx((2 / 0.6, 2 / 0.45))


def test_case_3_has_all_methods_at_megatrons_largest(measure):
    runs = [make_record("megatron-lm", 2, seconds=0.25), make_record(layers=2), make_record(layers=3)]
    assert values(shown(3, measure(*runs)).here) == {Wanted("megatron-lm", 2): 8.0, Wanted("stronghold", 2, 1): 4.0}


def test_case_4_takes_any_number_of_layers_of_its_window(measure):
    runs = [make_record(layers=n, seconds=n / 10) for n in (5, 2)] + [make_record(layers=3, window=2)]
    found = shown(4, measure(*runs, make_record("l2l", 4), make_trial(layers=6)))
    assert values(found.here) == {Wanted("stronghold", 2, 1): 0.2, Wanted("stronghold", 5, 1): 0.5}
    assert [point.low for point in found.here.points] == pytest.approx([0.18, 0.45])
    assert [point.high for point in found.here.points] == pytest.approx([0.24, 0.6])
    assert found.notes == ("stronghold, 3 layers, window 1: no run of it yet",)


def test_case_5_takes_any_window_of_its_model(measure):
    runs = [make_record(window=n, seconds=n / 10) for n in (4, 2, 1)] + [make_record(window="auto")]
    found = shown(5, measure(*runs, make_record(layers=3, window=2)))
    assert values(found.here) == {Wanted("stronghold", 2, n): n / 10 for n in (1, 2, 4)}
    assert found.notes == ()


def test_other_settings_belong_to_no_case_whatever_the_files_name(measure):
    (other,) = measure(make_record(settings={"hidden": 128, "log": "log_stronghold_l-2_h-64_bs-2_ws-1_x.txt"}))
    for number in CASES:
        found = shown(number, [other])
        assert found.here is None
        assert found.notes == ("1 results have other settings than those of --machine tiny",)


def test_the_newest_of_several_runs_is_shown_and_said(measure):
    old, new = measure(make_record(seconds=0.5), make_record(seconds=0.1, machine={"time": "2026-02-01"}))
    found = shown(5, [new, old])
    assert values(found.here) == {Wanted("stronghold", 2, 1): 0.1}
    assert "stronghold, 2 layers, window 1: 2 runs, the newest is shown (record 2)" in found.notes


def test_machines_are_not_mixed_unless_one_is_chosen(measure):
    there = {"host": HOST | {"processor": "Other CPU"}}
    both = measure(make_record(seconds=0.5), make_record(window=2, seconds=0.1, machine=there))
    with pytest.raises(ValueError, match=r"one machine \(they are of 2 of 'Other CPU, .*'; 'Some CPU.*--measured-on"):
        shown(5, both)
    with pytest.raises(ValueError, match="that name fits 0 of"):
        shown(5, both, on="no such")
    with pytest.raises(ValueError, match="that name fits 2 of"):
        shown(5, both, on="CPU")
    found = shown(5, both, on="Other")
    assert found.here.machine == "Other CPU, 2 cores, 8.00 GiB"
    assert values(found.here) == {Wanted("stronghold", 2, 2): 0.1}
    assert "1 results are left out: measured on Some CPU, 2 cores, 8.00 GiB" in found.notes


def test_the_machines_of_a_case_are_those_of_what_belongs_to_it(measure):
    there = {"host": HOST | {"processor": "Other CPU"}}
    items = measure(make_record(), make_record(machine=there), make_trial(machine={"host": HOST | {"cores": 64}}))
    assert machines_of(CASES[5], TINY, items) == ["Other CPU, 2 cores, 8.00 GiB", "Some CPU, 2 cores, 8.00 GiB"]
    assert machines_of(CASES[1], TINY, items) == ["Some CPU, 64 cores, 8.00 GiB"]
    assert machines_of(CASES[5], V100, items) == []


def test_a_host_is_told_from_the_same_with_its_gpu(measure):
    gpu = {"gpus": [{"name": "Some GPU", "memory_bytes": 2**34}]}
    both = measure(make_record(), make_record(machine=gpu, settings={"device": "cuda"}, seconds=0.1))
    assert values(shown(5, both, on="Some GPU").here) == {Wanted("stronghold", 2, 1): 0.1}
    assert values(shown(5, both, on="Some CPU, 2 cores, 8.00 GiB").here) == {Wanted("stronghold", 2, 1): 0.5}


def test_a_run_that_came_to_its_end_goes_before_a_newer_one_that_did_not(measure):
    cut = make_record(seconds=0.1, interrupted=True, machine={"time": "2026-02-01"})
    assert values(shown(5, measure(make_record(), cut)).here) == {Wanted("stronghold", 2, 1): 0.5}
    assert "record 1: interrupted" in shown(5, measure(cut)).notes


def test_a_result_that_does_not_belong_mixes_nothing(measure):
    there = {"host": HOST | {"processor": "Other CPU"}}
    items = measure(make_record(), make_record(machine=there, settings={"hidden": 128}), make_trial(machine=there))
    assert len(shown(5, items).here.points) == 1


def test_logs_of_the_artifact_stand_in_for_its_tables_by_the_papers_settings(tmp_path, measure):
    logs = [
        read_artifact_log(tmp_path / "a.txt", artifact_log(window=window, times=(9e9, 1000.0 * window)))
        for window in (2, 15)
    ]
    logs.append(replace(logs[0], settings={**logs[0].settings, "hidden": 1024}))
    found = shown(5, [*logs, *measure(make_record())])
    assert values(found.published) == {Wanted("stronghold", 32, 2): 2.0, Wanted("stronghold", 32, 15): 15.0}
    assert values(found.here) == {Wanted("stronghold", 2, 1): 0.5}
    assert "its logs" in found.published.machine
    assert found.notes.count(f"{tmp_path}/a.txt: cut short after iteration 20 of 50") == 1


def test_a_wrong_run_stays_and_is_marked(measure):
    (item,) = measure(make_record(wrong="its loss differs in step 3"))
    assert shown(5, [item]).here.points[0].wrong == "its loss differs in step 3"


def test_the_published_tables_are_the_artifacts():
    assert values(table_of(CASES[3])) == {
        Wanted("megatron-lm", 32): 0.7496,
        Wanted("l2l", 32): 0.1729,
        Wanted("zero-offload", 32): 0.3711,
        Wanted("zero-infinity", 32): 0.3587,
        Wanted("stronghold", 32, 15): 0.6647,
    }
    largest = {point.wanted.method: round(point.y / 1e9, 3) for point in table_of(CASES[1]).points}
    assert largest == {
        "megatron-lm": 1.717, "l2l": 4.033, "zero-offload": 2.522, "zero-infinity": 2.522, "stronghold": 5.141,
    }  # fmt: skip
    throughput = {(p.wanted.group, p.wanted.method): p.y for p in table_of(CASES[2]).points}
    assert throughput["l2l", "l2l"] == 0.0529
    assert throughput["l2l", "stronghold"] == 0.2271
    assert throughput["zero-infinity", "stronghold"] == 0.3999
    for case in CASES.values():
        assert {point.wanted for point in table_of(case).points} >= set(case.runs(V100, V100.largest))


def test_a_cases_runs_are_those_of_the_artifact():
    runs = {number: list(case.runs(V100, V100.largest)) for number, case in CASES.items()}
    assert runs[1] == []  # trials, found by searching
    assert runs[2][2:4] == [Wanted("l2l", 78, None, "l2l"), Wanted("stronghold", 78, 15, "l2l")]
    assert [run.layers for run in runs[4]] == [16, 24, 32, 40, 48, 56, 64, 78, 92]
    assert [run.window for run in runs[5]] == [2, 4, 6, 8, 10, 12, 14, 15]
    assert {run.layers for run in runs[3]} == {run.layers for run in runs[5]} == {32}
    assert "fsdp-offload" not in {run.method for run in CASES[2].runs(CPU, CPU.largest)}  # until it is known


def test_what_is_missing_is_each_run_once(measure):
    assert list(missing_runs(CASES[2], TINY, [])) == [Wanted("megatron-lm", 2), Wanted("stronghold", 2, 1)]
    assert list(missing_runs(CASES[2], TINY, measure(make_record()))) == [Wanted("megatron-lm", 2)]
    assert list(missing_runs(CASES[4], TINY, measure(make_record()))) == [Wanted("stronghold", 3, 1)]
    assert len(list(missing_runs(CASES[4], TINY, measure(make_trial())))) == 2  # a trial is too short to be timed

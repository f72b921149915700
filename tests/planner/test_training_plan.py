"""What a plan says, and what its file may hold."""

import json
import math
from dataclasses import replace

import pytest

from stronghold.planner.machine_file import Spread
from stronghold.planner.other_plans import Alternative, LeftOut, Refused
from stronghold.planner.training_plan import TrainingPlan
from stronghold.spans import Span

GIB = 2**30


def plan(**changes):
    values = {
        "model": "a model",
        "parameters": 6_600_000_000,
        "trained_parameters": 6_600_000_000,
        "layers": 32,
        "samples": 8,
        "tokens": 8192,
        "dtype": "bfloat16",
        "machine": "a GPU",
        "device": "cuda",
        "is_host": False,
        "settings": {"window": 4, "resident": 1, "activations": "recompute", "device_memory": 17 * GIB},
        "optimizer": {"states": "fp32", "update": "deferred"},
        "step_s": Spread(3.0, 4.0, 5.0),
        "longest": "updates",
        "busy_s": {"updates": 3.0, "compute": 2.0},
        "waits_s": {"update": 1.0, "fetch": 0.01},
        "slots_bytes": 2 * GIB,
        "gradient_bytes": GIB,
        "root_bytes": 0,
        "resident_bytes": 3 * GIB,
        "root_gradient_bytes": GIB // 2,
        "activation_bytes": 4 * GIB,
        "pinned_bytes": 12 * GIB,
        "pageable_bytes": 60 * GIB,
        "process_bytes": GIB,
        "disk_bytes": 0,
        "written_bytes": 0,
        "others": [
            Alternative(
                settings={"window": 3, "resident": 1, "activations": "recompute", "device_memory": 16 * GIB},
                optimizer={"states": "fp32", "update": "in_backward"},
                step_s=4.5,
                device_bytes=9 * GIB,
                host_bytes=70 * GIB,
            )
        ],
        "refused": [
            Refused(
                settings={"window": 4, "resident": 1, "activations": "keep", "device_memory": 12 * GIB},
                optimizer={"states": "fp32", "update": "deferred"},
                place="device",
                needed_bytes=25 * GIB,
                limit_bytes=23 * GIB,
            )
        ],
        "spans": [Span("compute", "0", 0.0, 0.5)],
    }
    return TrainingPlan(**(values | changes))


def test_sums_and_rates():
    assert plan().device_bytes == int(10.5 * GIB)
    assert plan().host_bytes == 73 * GIB
    assert plan(is_host=True).host_bytes == int(83.5 * GIB)
    assert plan().tokens_per_s == 2048
    assert plan().days(2048 * 86400 * 3) == pytest.approx(3)


def test_a_step_of_more_batches_takes_what_each_further_one_does():
    further = {"step": 2.0, "update": 0.0, "fetch": 0.5, "gradients": 0.1}
    planned = plan(further_s=further).planned()
    assert planned.of_passes(1) is planned
    longer = planned.of_passes(4)
    assert (longer.low_s, longer.likely_s, longer.high_s) == (3.0 * 2.5, 4.0 + 3 * 2.0, 5.0 * 2.5)
    assert longer.parts_s == {
        "compute_s": planned.parts_s["compute_s"] + 3 * 1.5,
        "fetch_wait_s": 0.01 + 3 * 0.5,
        "update_wait_s": 1.0,
        "disk_wait_s": 0.0,
    }
    assert sum(longer.parts_s.values()) == pytest.approx(longer.likely_s)
    assert longer.of_passes(1).likely_s == pytest.approx(planned.likely_s)
    of_four = plan(settings={**plan().settings, "accumulate": 4}, further_s=further)
    assert of_four.planned().of_passes(4) == of_four.planned()
    assert of_four.planned().of_passes(3).likely_s == pytest.approx(2.0)
    assert plan().planned().of_passes(4) == plan().planned()  # nobody has said what one takes
    lines = {(section, name): value for section, name, value in of_four.rows()}
    assert lines["", "speed"].endswith("8 samples a step in 4 batches, each further one 2.00 s")


def test_it_reads_as_a_table():
    lines = {(section, name): value for section, name, value in plan().rows()}
    assert lines["offload", "window"] == "4"
    assert lines["", "device_memory"] == "17.0 GiB"
    assert lines["AdamW", "states"] == "'fp32'"
    assert lines["step", "time"] == "4.00 s (3.00 s to 5.00 s)"
    assert lines["", "longest resource"] == "updates, 75% of the step"
    assert lines["", "waiting for an update"] == "1.00 s (25%)"
    assert ("", "waiting for a fetch") not in lines  # a four hundredth of the step
    assert lines["", "1 B tokens"] == "5.65 days"
    assert ("", "root") not in lines  # nothing
    assert lines["next best", "4.50 s"] == "window=3, update='in_backward': device 9.00 GiB, host 70.0 GiB"
    assert lines["does not fit", "device"] == "activations='keep': needs 25.0 GiB, has 23.0 GiB"


def test_what_lacks_little_is_told_by_that():
    refused = [replace(plan().refused[0], needed_bytes=23 * GIB + 2**20)]
    lines = {(section, name): value for section, name, value in plan(refused=refused).rows()}
    assert lines["does not fit", "device"] == "activations='keep': lacks 1.00 MiB of 23.0 GiB"


def test_layers_in_memory_are_told_as_such_beside_those_on_disk():
    on_disk = plan(settings={**plan().settings, "store": ["/mnt/a"], "activations": "keep"})
    lines = {(section, name): value for section, name, value in on_disk.rows()}
    assert lines["does not fit", "device"].startswith("store='ram': needs")
    assert "store=None" not in str(on_disk)


def test_layers_of_stages_that_keep_their_activations_are_told():
    cut = {"partition": [17, 15], "recompute_ratio": [1, 0.5]}
    lines = {
        (s, n): v for s, n, v in plan(**{**IN_STAGES, "parallel": {**IN_STAGES["parallel"], "balance": cut}}).rows()
    }
    assert lines["", "stages"] == "2, of 17,15 layers, of which 0,8 keep their activations"


IN_STAGES = {
    "processes": 4,
    "parallel": {"stages": 2, "replicas": 2, "micro_batches": 8, "schedule": "1F1B", "balance": [17, 15]},
    "waits_s": {"stages": 1.0, "update": 0.5},
    "left_out": (LeftOut(stages=1, replicas=4, reason="the replicas must divide the batch"),),
}


def test_several_processes_are_told_with_what_each_takes_and_what_they_cannot_be():
    others = [
        replace(plan().others[0], parallel={"stages": 4, "replicas": 1, "micro_batches": 16, "balance": [8] * 4}),
        replace(plan().others[0], settings=plan().settings, parallel={"stages": 1, "replicas": 4}, step_s=5.0),
    ]
    found = plan(**IN_STAGES, others=others)
    lines = {(section, name): value for section, name, value in found.rows()}
    assert lines["processes", "number"] == "4 on this machine; start as many by torchrun"
    assert lines["", "stages"] == "2, of 17,15 layers"
    assert lines["", "replicas"] == "2"
    assert lines["", "micro-batches"] == "8 under 1F1B"
    assert lines["", "memory of each"] == "device 10.5 GiB, host 73.0 GiB at most"
    assert lines["", "waiting for other stages"] == "1.00 s (25%)"
    assert lines["left out", "stages=1, replicas=4"] == "the replicas must divide the batch"
    taken = "device 9.00 GiB, host 70.0 GiB"
    assert lines["next best", "4.50 s"] == f"{DIFFERENT}: {taken}"
    assert lines["", "5.00 s"] == f"stages=1, replicas=4, update='in_backward': {taken}"
    lines = {name: value for _, name, value in replace(found, is_host=True).rows()}
    assert lines["memory of each"] == "83.5 GiB at most"


DIFFERENT = "stages=4, replicas=1, micro_batches=16, window=3, update='in_backward'"


def test_what_is_of_several_processes_is_in_their_files_alone(tmp_path):
    found = plan(**IN_STAGES)
    found.write(tmp_path / "plan.json")
    read = TrainingPlan.read(tmp_path / "plan.json")
    assert (read.processes, read.parallel, read.left_out) == (4, IN_STAGES["parallel"], IN_STAGES["left_out"])
    assert not {"processes", "parallel", "left_out"} & json.loads(plan().to_json()).keys()


def test_what_is_frozen_and_the_wear_of_the_disk_are_told():
    lines = {name: value for _, name, value in plan(trained_parameters=4_000_000, written_bytes=2 * 10**9).rows()}
    assert lines["parameters"] == "6.6 B, 4 M of them trained"
    lines = {name: value for _, name, value in plan(disk_bytes=80 * GIB, written_bytes=2 * 10**9).rows()}
    assert lines["written"].endswith("a step, 2 TB in a thousand")


def test_one_memory_is_told_once():
    rows = plan(is_host=True).rows()
    lines = {name: value for _, name, value in rows}
    assert lines["pageable"] == "72.0 GiB"
    assert "pinned" not in lines
    assert lines["with the device's"] == "83.5 GiB"
    assert ("next best", "4.50 s", "window=3, update='in_backward': host 70.0 GiB") in rows


def test_a_file_is_read_as_it_was_written(tmp_path):
    found = plan()
    found.write(tmp_path / "plan.json")
    read = TrainingPlan.read(tmp_path / "plan.json")
    lists = {name: list(getattr(found, name)) for name in ("others", "refused", "spans", "assumed")}
    assert read == replace(found, **lists)
    assert str(read) == str(found)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: "no JSON", "JSONDecodeError"),
        (lambda _: "[]", "its version is not 2"),
        (lambda found: json.dumps({**found, "version": 1}), "its version is not 2"),
        (lambda found: json.dumps({**found, "step_s": [1, 2]}), "TypeError"),
        (lambda found: json.dumps({**found, "settings": {"window": "wide"}}), "window must be"),
        (lambda found: json.dumps({**found, "settings": {"colour": 1}}), "colour"),
        (lambda found: json.dumps({**found, "optimizer": {"states": "fp64", "update": "deferred"}}), "fp64"),
        (
            lambda found: json.dumps({**found, "optimizer": {**found["optimizer"], "lr": 1}}),
            "a key of optimizer .*'lr'",
        ),
        (lambda found: json.dumps({**found, "slots_bytes": "many"}), "TypeError|slots_bytes must be a whole number"),
        (lambda found: json.dumps({**found, "dtype": "bf16"}), "dtype must be .*float32.*bfloat16.*bf16"),
        (lambda found: json.dumps({**found, "samples": 0}), "samples must be a whole number of 1 or more"),
        (lambda found: json.dumps({**found, "samples": "4"}), "samples must be a whole number of 1 or more"),
        (lambda found: json.dumps({**found, "tokens": 10**400}), "OverflowError|tokens must be a whole number"),
        (lambda found: json.dumps({**found, "samples": 2, "tokens": 7}), "tokens must be a multiple of samples"),
        (lambda found: json.dumps({**found, "device": ["cpu"]}), "device must be a text"),
        (lambda found: json.dumps({**found, "step_s": [1, 0, 1]}), "step_s must be three numbers above 0"),
        (lambda found: json.dumps({**found, "step_s": [1, math.nan, 1]}), "step_s must be three numbers above 0"),
        (lambda found: json.dumps({name: found[name] for name in found if name != "longest"}), "longest"),
        (lambda found: json.dumps({**found, "others": [{"settings": {}}]}), "TypeError"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, change, reason):
    (tmp_path / "plan.json").write_text(change(json.loads(plan().to_json())))
    with pytest.raises(ValueError, match=rf"plan.json' is no plan: .*{reason}.*; make one: stronghold plan -o"):
        TrainingPlan.read(tmp_path / "plan.json")

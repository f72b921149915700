"""The step model against the engine on machines of given speed, against a longest path, and against closed formulas."""

import itertools
import random
from dataclasses import replace

import pytest

from benchmarks.plan_cases import draw, run, slower, with_inputs_on_disk, with_inputs_on_host, with_passes
from stronghold.planner import issued_inputs
from stronghold.planner.issuing import program_of
from stronghold.planner.play import play
from stronghold.planner.program import Kind, Operation, Program, Shape
from stronghold.planner.step import step_time
from stronghold.planner.step_bound import step_bound
from stronghold.planner.step_costs import LINK_UP_IS_ONE, HostWork, LayerWork, Machine, Resource, RootWork, StepSettings
from stronghold.store import INPUT_STAGING
from stronghold.window import INPUT_SLOTS
from tests.crossed import seeds


def exact(number):
    return pytest.approx(number, rel=1e-9, abs=1e-12)


# Against the engine.


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(with_inputs_on_host(draw(n)) if n >= 40 else draw(n), marks=pytest.mark.long if n % 3 else ())
        for n in range(60)
    ],
)
def test_a_step_is_the_engine_s_by_its_clocks_and_so_is_all_that_happens_in_it(case):
    outcome = run(case, paced=False)
    planned = outcome.planned
    assert planned.step_s == exact(outcome.clock_s)
    known = {}
    for span in planned.spans:
        known.setdefault((span.lane, span.name), []).append(span)
    roots = [span.name for span in outcome.spans if span.lane == "root"]
    compared = 0
    for lane, name, begin_s, end_s in outcome.spans:
        if lane == "waits":
            continue
        kind, _, unit = name.rpartition(" ")
        if begin_s >= planned.step_s * (1 - 1e-9) or (kind, lane) == ("update", "compute"):
            continue
        if unit.startswith("layers."):
            unit = f"layer {unit.removeprefix('layers.')}"
        else:
            unit = f"root {roots.index(f'upload {unit}')}"
        found = known[lane, f"{kind} {unit}"]
        if kind == "backward" or (kind == "forward" and case.activations == "host"):
            # The engine's begins before it waits for a gradient slot, or for one of its inputs.
            assert end_s in [exact(span.end_s) for span in found]
        else:
            assert (begin_s, end_s) in [(exact(span.begin_s), exact(span.end_s)) for span in found]
        compared += 1
    assert compared > (4 if case.activations == "host" else 2) * len(case.widths)


@pytest.mark.parametrize(
    ("seed", "passes"),
    [
        pytest.param(seed, passes, marks=pytest.mark.long if (seed + passes) % 3 else ())
        for seed in range(400, 420)
        for passes in (2, 3, 5)
    ],
)
def test_a_step_of_several_passes_is_the_engine_s_by_its_clocks(seed, passes):
    case = with_passes(with_inputs_on_host(draw(seed)) if seed % 4 == 3 else draw(seed), passes)
    outcome = run(case, paced=False)
    assert outcome.planned.step_s == exact(outcome.clock_s)


BY_THE_WALL = [
    *(draw(seed, layers=8, on_disk=seed % 3 == 2) for seed in range(300, 312)),
    *(with_inputs_on_disk(draw(seed, layers=8, on_disk=True)) for seed in range(312, 318)),
]


@pytest.mark.long
@pytest.mark.parametrize("case", BY_THE_WALL)
def test_a_step_is_the_engine_s_by_the_wall(case):
    """What is slow is played by sleeping; what the machine at hand does meanwhile disturbs it.

    Where the two differ it is measured once more at a third of the pace, so that this counts a third as much, and an
    error of the model as much as before.
    """
    errors = [run(case, paced=True).error]
    if abs(errors[0]) > 0.02:
        errors.append(run(slower(case, 3), paced=True).error)
    assert abs(errors[-1]) <= 0.03, errors


# Against a longest path.


def random_step_work(seed, *, slowed):
    rng = random.Random(seed)
    layers, resident = rng.randint(2, 12), rng.choice((0, 0, 1))
    work = [
        LayerWork(
            forward_s=rng.uniform(1, 3),
            backward_s=(backward_s := rng.uniform(2, 9)),
            first_gradient_s=backward_s * rng.choice((0, 0.3)),
            weight_bytes=rng.randint(100, 900),
            gradient_bytes=rng.randint(100, 900),
            elements=rng.choice((0, 50, 90, 90)),
            recomputed=rng.random() < 0.5,
        )
        for _ in range(layers)
    ]
    root = [RootWork(first=first, forward_s=1, backward_s=2, weight_bytes=100, elements=60) for first in (True, False)]
    machine = Machine(
        h2d_bytes_per_s=rng.uniform(100, 500),
        d2h_bytes_per_s=rng.uniform(100, 500),
        host_update_ns=rng.uniform(1e7, 1e8),
        device_update_ns=1e6,
        copy_s=0.01,
        launch_s=rng.choice((0, 0.1, 2)),
        runs_behind=rng.random() < 0.6,
        slowed=slowed,
    )
    settings = StepSettings(
        window=rng.randint(1, layers - resident),
        resident=range(resident),
        in_backward=rng.random() < 0.5,
        pieces=rng.randint(1, 3),
    )
    if rng.random() < 0.4:
        work = [replace(layer, input_bytes=rng.choice((0, 200, 800))) for layer in work]
    return work, machine, settings, root


def random_step(seed, *, slowed):
    return step_time(*random_step_work(seed, slowed=slowed))


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_where_nothing_is_slowed_an_operation_ends_at_the_end_of_the_longest_path_to_it(seed):
    step = random_step(seed, slowed={})
    program, played = step._program, step._played
    ends_s = []
    for here, one in enumerate(program.operations):
        work_s = played.ends_s[here] - played.begins_s[here]
        ends_s.append(max((ends_s[before] for before in one.after), default=0.0) + work_s)
    assert ends_s == [exact(end_s) for end_s in played.ends_s]


@pytest.mark.parametrize("slowed", [{}, LINK_UP_IS_ONE, {(Resource.UPDATES, Resource.COMPUTE): 1.5}])
@pytest.mark.parametrize("seed", range(20))
def test_what_it_computes_and_what_it_waits_for_is_the_step(seed, slowed):
    step = random_step(seed, slowed=slowed)
    assert step.busy_s["compute"] + sum(step.waits_s.values()) == exact(step.step_s)
    assert step.busy_s[step.longest] <= step.step_s * (1 + 1e-9)
    assert all(waits_s >= 0 for waits_s in step.waits_s.values())


@pytest.mark.parametrize("seed", seeds(60, 20))
def test_a_disk_works_as_long_as_its_transfers_take_and_no_longer_than_the_step(seed):
    """A transfer that gives way to a more urgent one counted for as long as that took, too."""
    work, machine, settings, root = random_step_work(seed, slowed={})
    rng = random.Random(seed)
    work = [replace(one, on_disk=rng.random() < 0.5, ring_bytes=rng.choice((0, 3 * 10**7))) for one in work]
    machine = replace(machine, disk_read_bytes_per_s=2e6, disk_write_bytes_per_s=3e6)
    step = step_time(work, machine, settings, root)
    begin_s, end_s = step._begin_s, step._end_s
    edges = sorted({begin_s, end_s, *(edge for job in step._played.disk_jobs for edge in (job.began_s, job.ended_s))})
    at_work_s = sum(
        to_s - from_s
        for from_s, to_s in itertools.pairwise(edges)
        if begin_s <= from_s and to_s <= end_s
        if any(job.began_s <= from_s and to_s <= job.ended_s for job in step._played.disk_jobs)
    )
    assert step.busy_s["disk"] == exact(at_work_s)
    assert all(seconds <= (end_s - begin_s) * (1 + 1e-9) for seconds in step.busy_s.values())


@pytest.mark.parametrize("seed", seeds(200, 50))
def test_a_step_of_several_passes_takes_no_less_than_its_bound_and_all_but_the_first_as_long(seed):
    work, machine, settings, root = random_step_work(seed, slowed=LINK_UP_IS_ONE)
    rng = random.Random(seed)
    work = [replace(layer, add_s=rng.choice((0, 0.5, 2))) for layer in work]
    root = [replace(one, add_s=rng.choice((0, 1)), resident=rng.random() < 0.3) for one in root]
    machine = replace(machine, host_add_ns=machine.host_update_ns / 3)
    if rng.random() < 0.4:
        on_disk = [{"on_disk": rng.random() < 0.5, "ring_bytes": rng.choice((0, 0, 10**6))} for _ in work]
        work = [replace(layer, **there) for layer, there in zip(work, on_disk, strict=True)]
        machine = replace(machine, disk_read_bytes_per_s=2e5, disk_write_bytes_per_s=3e5)
    passes = [replace(settings, in_backward=False, passes=n) for n in (1, 2, 3, 4, 7)]
    steps = [step_time(work, machine, one, root) for one in passes]
    for step, one in zip(steps, passes, strict=True):
        assert step_bound(work, machine, one, root).step_s <= step.step_s * (1 + 1e-9)
        assert step.busy_s["compute"] + sum(step.waits_s.values()) == exact(step.step_s)
    further_s = steps[1].step_s - steps[0].step_s
    assert [step.step_s - steps[0].step_s for step in steps] == [exact(n * further_s) for n in (0, 1, 2, 3, 6)]


# Against closed formulas. Layers compute 1 s forward and 3 s backward, unless a test says otherwise.


def alike(layers, **changes):
    work = {"forward_s": 1, "backward_s": 3, "weight_bytes": 1, "gradient_bytes": 1, "elements": 1}
    return [LayerWork(**(work | changes))] * layers


def machine(**changes):
    rates = {"h2d_bytes_per_s": 1e9, "d2h_bytes_per_s": 1e9, "host_update_ns": 0, "runs_behind": False}
    return Machine(**(rates | changes))


def test_with_all_else_at_once_a_step_is_its_computation():
    step = step_time(alike(6), machine(), StepSettings(window=2))
    assert step.step_s == pytest.approx(24, abs=1e-6)
    assert step.longest == "compute"


def test_resident_layers_are_updated_in_the_computation():
    step = step_time(alike(3), machine(device_update_ns=2e9), StepSettings(window=1, resident=range(3)))
    assert step.step_s == exact(3 * (1 + 3 + 2))
    assert {lane for lane, busy_s in step.busy_s.items() if busy_s} == {"compute"}


def test_a_window_of_one_waits_for_each_fetch():
    """Twice 4 fetches of 2 s, but for the last layer's, which is still there for the backward pass."""
    step = step_time(alike(4), machine(h2d_bytes_per_s=0.5), StepSettings(window=1))
    assert step.step_s == pytest.approx(4 * 4 + 7 * 2, abs=1e-6)
    assert step.waits_s["fetch"] == pytest.approx(7 * 2, abs=1e-6)
    assert step.busy_s["fetches"] == pytest.approx(14, abs=1e-6)


def test_a_fetch_waits_for_the_computation_that_reads_its_slot_also_where_that_runs_behind_the_host():
    step = step_time(alike(4), machine(h2d_bytes_per_s=0.5, runs_behind=True), StepSettings(window=1))
    assert step.step_s == pytest.approx(4 * 4 + 7 * 2, abs=1e-6)


def test_a_deferred_update_of_the_whole_model_holds_up_the_next_forward_pass():
    """Layer 0 is updated for 10 s, then every 10 s another: the forward pass ends 1 s behind the last."""
    step = step_time(alike(4), machine(host_update_ns=10e9), StepSettings(window=4))
    assert step.step_s == pytest.approx(4 * 10 + 1 + 4 * 3, abs=1e-6)
    assert step.waits_s["update"] == pytest.approx(40 - 3, abs=1e-6)
    assert step.longest == "updates"


def test_gradient_slots_that_are_not_drained_hold_the_backward_pass_up():
    """Gradients go down for 10 s each: the first two layers' slots are free, each other waits; all are awaited."""
    step = step_time(alike(5), machine(d2h_bytes_per_s=0.1), StepSettings(window=5))
    assert step.step_s == pytest.approx(5 * 1 + 3 + 5 * 10, abs=1e-6)
    assert step.waits_s["gradients"] == pytest.approx(50 - 4 * 3, abs=1e-6)


def test_inputs_that_go_down_more_slowly_than_layers_compute_hold_the_forward_pass_up():
    """They go down for 10 s each, and the last ones must be there before they come up again."""
    settings = StepSettings(window=1, resident=range(6))
    step = step_time(alike(6, input_bytes=1), machine(d2h_bytes_per_s=0.1), settings)
    assert step.step_s == pytest.approx(6 * 10 + 6 * 3, abs=1e-6)
    assert step.waits_s["inputs"] == pytest.approx(60 - 6, abs=1e-6)
    assert step.busy_s["gradients"] == pytest.approx(60, abs=1e-6)


def test_inputs_come_up_one_layer_ahead():
    """The last layer's begin to come up, for 10 s, with the backward pass, each other's behind them."""
    settings = StepSettings(window=1, resident=range(6))
    step = step_time(alike(6, input_bytes=1), machine(h2d_bytes_per_s=0.1), settings)
    assert step.step_s == pytest.approx(6 * 1 + 6 * 10 + 3, abs=1e-6)
    assert step.waits_s["fetch"] == pytest.approx(60 - 5 * 3, abs=1e-6)


def test_inputs_have_the_engine_s_buffers():
    assert (issued_inputs.SLOTS, issued_inputs.STAGING) == (INPUT_SLOTS, INPUT_STAGING)


def test_inputs_on_disk_are_read_two_layers_ahead():
    """Three layers' are in staging still. The fourth's are read, for 10 s, behind the last layer's backward pass."""
    layers = alike(6, input_bytes=1, inputs_on_disk=True)
    step = step_time(layers, machine(disk_read_bytes_per_s=0.1), StepSettings(window=1, resident=range(6)))
    assert step.step_s == pytest.approx(6 * 1 + 3 + 3 * 10 + 3, abs=1e-6)
    assert step.busy_s["disk"] == pytest.approx(3 * 10, abs=1e-6)
    assert step.waits_s["disk"] == pytest.approx(step.step_s - 6 * 4, abs=1e-6)


def test_inputs_that_are_written_more_slowly_than_layers_compute_hold_the_forward_pass_up():
    """The last layer's go to staging when the fourth last one's are on disk."""
    layers = alike(8, input_bytes=1, inputs_on_disk=True)
    step = step_time(layers, machine(disk_write_bytes_per_s=0.1), StepSettings(window=1, resident=range(8)))
    (last,) = [one for one in step.spans if one.name == "inputs down layer 7"]
    assert last.begin_s == pytest.approx(5 * 10, abs=1e-6)
    assert step.busy_s["disk"] == pytest.approx(8 * 10, abs=1e-6)


def test_recomputation_goes_on_while_a_gradient_slot_is_not_drained():
    """The fifth layer's 2 s without a gradient are over when its slot is free, so that 1 s is left then."""
    slow, settings = machine(d2h_bytes_per_s=0.25), StepSettings(window=5)
    at_once, later = (step_time(alike(5, first_gradient_s=s), slow, settings).step_s for s in (0, 2))
    assert at_once == pytest.approx(later, abs=1e-6)  # all wait for the last gradient in the end
    (one,) = [s for s in step_time(alike(5, first_gradient_s=2), slow, settings).spans if s.name == "backward layer 2"]
    assert one.end_s - one.begin_s == exact(1)


def test_a_host_that_launches_more_slowly_than_the_device_computes_is_the_step():
    step = step_time(alike(6), machine(launch_s=5, runs_behind=True), StepSettings(window=2, pieces=2))
    assert step.step_s == pytest.approx(6 * 2 * 10 + 3, abs=1e-6)  # the last layer's backward pass comes behind
    assert step.longest == "host"
    assert step.waits_s["launch"] == pytest.approx(step.step_s - 6 * 4, abs=1e-6)


def test_a_layer_that_is_recomputed_is_issued_again_in_its_backward_pass():
    slow, settings = machine(launch_s=5, runs_behind=True), StepSettings(window=2, pieces=2)
    steps = [step_time(alike(6, recomputed=recomputed), slow, settings) for recomputed in (False, True)]
    assert steps[1].step_s - steps[0].step_s == pytest.approx(6 * 2 * 5, abs=1e-6)
    assert steps[1].waits_s["launch"] - steps[0].waits_s["launch"] == pytest.approx(6 * 2 * 5, abs=1e-6)
    assert steps[1].busy_s["host"] == exact(6 * 2 * 15)
    assert step_bound(alike(6, recomputed=True), slow, settings).step_s == exact(6 * 2 * 15)


def test_what_the_engine_does_for_a_layer_takes_the_host_that_issues_it():
    own = HostWork(forward_s=1, backward_s=2, streamed_forward_s=3, streamed_backward_s=5, again_s=7, update_s=11)
    slow = machine(launch_s=13, host_work=own, runs_behind=True)
    for in_backward, handed_s in ((False, 0), (True, 11)):
        settings = StepSettings(window=2, pieces=2, resident=(0, 1), in_backward=in_backward)
        layers = [*alike(3, recomputed=False), *alike(3, recomputed=True)]
        of_resident = 2 * (2 * (13 + 1 + 13 + 2) + 11)
        of_streamed = 4 * (2 * (13 + 3 + 13 + 5) + handed_s) + 3 * 2 * (13 + 7)
        assert step_time(layers, slow, settings).busy_s["host"] == exact(of_resident + of_streamed)
        assert step_bound(layers, slow, settings).step_s == exact(of_resident + of_streamed)


def test_a_frozen_layer_takes_no_more_of_the_host_backward_than_forward():
    own = HostWork(forward_s=1, backward_s=2, streamed_forward_s=3, streamed_backward_s=5, update_s=11)
    slow, settings = machine(launch_s=13, host_work=own, runs_behind=True), StepSettings(window=2, resident=(0, 1))
    step = step_time(alike(6, elements=0, gradient_bytes=0), slow, settings)
    assert step.busy_s["host"] == exact(2 * 2 * (13 + 1) + 4 * 2 * (13 + 3))


def test_a_device_that_runs_behind_is_launched_ahead_of():
    step = step_time(alike(6), machine(launch_s=0.5, runs_behind=True), StepSettings(window=2))
    assert step.step_s == pytest.approx(6 * 4 + 0.5, abs=1e-6)


def test_layers_on_disk_are_read_before_each_fetch_and_their_states_read_and_written_back():
    """A step reads the weights of 2 · 4 - 2 fetches and those of 4 updates with states, and writes these."""
    layers = alike(4, weight_bytes=2, on_disk=True, ring_bytes=10)
    slow = machine(disk_read_bytes_per_s=1, disk_write_bytes_per_s=0.5)
    step = step_time(layers, slow, StepSettings(window=2))
    assert step.busy_s["disk"] == exact((2 * 4 - 2) * 2 + 4 * 10 + 4 * 20)
    assert step.longest == "disk"


def test_what_is_issued_in_a_step_over_a_disk():
    """Layers 0 and 1 are read by their own fetches, for which they have just changed; all others two fetches ahead."""
    shape = Shape(
        window=2,
        resident=frozenset(),
        trained=(True,) * 4,
        on_disk=(True,) * 4,
        chunks=(1,) * 4,
        root_first=(),
        root_updates=(),
        in_backward=False,
        staged=True,
        runs_behind=False,
    )
    program = program_of(shape)
    steady = program.operations[program.ends[-2] + 1 :]
    issued = {
        lane: "".join(f"{one.kind.name[0]}{one.number} " for one in steady if one.resource is lane) for lane in Resource
    }
    assert issued[Resource.FETCHES] == "F2 F3 F1 F0 R0 F0 R1 F1 "
    assert issued[Resource.READS] == "R1 R0 R2 R3 "
    assert issued[Resource.UPDATES] == "U0 U1 U2 U3 "
    assert issued[Resource.COMPUTE] == "F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0 W0 P0 P1 P2 P3 E0 "


def test_a_layer_that_is_not_trained_has_neither_gradients_nor_an_update():
    step = step_time(alike(4, elements=0), machine(host_update_ns=1e9), StepSettings(window=2))
    assert step.busy_s["gradients"] == step.busy_s["updates"] == 0
    assert step.busy_s["fetches"] == exact(2 * 2 * 1e-9)  # nothing changes: 2 (L - w) fetches


def two_at_once(seconds, slowed):
    lanes = (Resource.FETCHES, Resource.GRADIENTS)
    program = Program(tuple(Operation(lane, Kind.FETCH, n, 0, ()) for n, lane in enumerate(lanes)), ())
    return play(program, seconds, slowed).ends_s


def test_operations_that_slow_one_another_advance_at_the_lower_rate():
    both = {(Resource.FETCHES, Resource.GRADIENTS): 2, (Resource.GRADIENTS, Resource.FETCHES): 2}
    assert two_at_once([1, 1], {}) == [1, 1]
    assert two_at_once([1, 1], both) == [2, 2]
    assert two_at_once([1, 3], both) == [2, 4]  # a third is left of the second, and then advances at its own rate
    assert two_at_once([1, 3], {(Resource.FETCHES, Resource.GRADIENTS): 4}) == [3.25, 3]


@pytest.mark.parametrize(
    ("window", "resident", "message"), [(0, (), "window"), (4, (0,), "window"), (1, (4,), "resident")]
)
def test_settings_out_of_range(window, resident, message):
    with pytest.raises(ValueError, match=message):
        step_time(alike(4), machine(), StepSettings(window=window, resident=resident))


def test_what_is_updated_in_the_backward_pass_has_one_pass():
    with pytest.raises(ValueError, match=r"accumulate no gradients \(got passes=2 with in_backward\)"):
        step_time(alike(4), machine(), StepSettings(window=1, in_backward=True, passes=2))


@pytest.mark.parametrize("changes", [{"forward_s": -1}, {"elements": float("inf")}, {"first_gradient_s": 4}])
def test_work_that_cannot_be(changes):
    with pytest.raises(ValueError, match="measure the model again"):
        alike(1, **changes)


@pytest.mark.parametrize(
    "changes", [{"h2d_bytes_per_s": 0}, {"copy_s": -1}, {"slowed": {(Resource.ROOT, Resource.FETCHES): 0.5}}]
)
def test_machines_that_cannot_be(changes):
    with pytest.raises(ValueError, match="probe the machine again"):
        machine(**changes)

"""The search against all choices of small spaces, on random models and machines."""

import random
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from stronghold.planner import search as search_module
from stronghold.planner.choices import Choice, Space
from stronghold.planner.disk_play import CHUNK_BYTES
from stronghold.planner.search import Work, search
from stronghold.planner.step import step_time
from stronghold.planner.step_bound import step_bound
from stronghold.planner.step_costs import LayerWork, Machine, RootWork, StepSettings
from tests.crossed import seeds
from tests.planner.test_step import random_step_work

STATE_BYTES = {"fp32": 8, "8bit": 2}


class Model:
    """A model of random layers on a random machine, and what it takes under a choice."""

    def __init__(self, seed, layers):
        rng = self.rng = random.Random(seed)
        factor = lambda: 10 ** rng.uniform(-0.5, 0.5)  # noqa: E731
        self.layers, alike = layers, rng.random() < 0.5
        self.elements = [10_000 if alike else rng.randint(4_000, 20_000) for _ in range(layers)]
        self.forward_s = [n * 1e-6 for n in self.elements]
        self.activation_bytes = [int(n * rng.choice((1, 4))) for n in self.elements]
        self.launch_s = rng.choice((0, 1e-4, 1e-3))
        self.machine = Machine(
            h2d_bytes_per_s=2e6 * factor(),
            d2h_bytes_per_s=2e6 * factor(),
            host_update_ns=1000 * factor(),
            device_update_ns=30,
            launch_s=self.launch_s,
            disk_read_bytes_per_s=2e7 * factor(),
            disk_write_bytes_per_s=1e7 * factor(),
            runs_behind=rng.random() < 0.7,
        )
        self.root = [RootWork(first=True, weight_bytes=20_000, elements=10_000)]

    @cache  # noqa: B019
    def resident(self, count):
        return [i * self.layers // count for i in range(count)]

    @cache  # noqa: B019
    def layer_work(self, layer, micro_batch, is_kept, states, store):
        elements, forward_s = self.elements[layer], self.forward_s[layer]
        forward_s *= {None: 1.0, 2: 1.03, 1: 1.1}[micro_batch]  # smaller products run less well
        return LayerWork(
            forward_s=forward_s,
            backward_s=forward_s * (2 if is_kept else 3),
            first_gradient_s=0 if is_kept else forward_s,
            weight_bytes=2 * elements,
            gradient_bytes=2 * elements,
            elements=elements,
            on_disk=store == "disk",
            recomputed=not is_kept,
            ring_bytes=(4 + STATE_BYTES[states]) * elements if store == "disk" else 0,
        )

    def work_of(self, choice):
        settings = StepSettings(
            window=choice.window,
            resident=self.resident(choice.resident),
            in_backward=choice.update == "in_backward",
            pieces=1 if choice.micro_batch is None else 4 // choice.micro_batch,
        )
        layers = [
            self.layer_work(layer, choice.micro_batch, layer >= self.layers - choice.kept, choice.states, choice.store)
            for layer in range(self.layers)
        ]
        return Work(layers=layers, machine=self.machine, settings=settings, root=self.root)

    @cache  # noqa: B019
    def elements_where(self, resident):
        """Of the layers that are not resident, all and the most of one; of those that are, all."""
        there = self.resident(resident)
        streamed = [n for layer, n in enumerate(self.elements) if layer not in there]
        return sum(streamed), max(streamed, default=0), sum(self.elements[layer] for layer in there)

    @cache  # noqa: B019
    def activations(self, kept):
        return sum(self.activation_bytes[self.layers - kept :])

    def bytes_of(self, choice):
        streamed, longest, resident = self.elements_where(choice.resident)
        working = max(self.activation_bytes) // (1 if choice.micro_batch is None else 4 // choice.micro_batch)
        state_bytes = STATE_BYTES[choice.states]
        on_host = (2 + 2 + state_bytes) * streamed
        gradients = 0 if choice.update == "in_backward" else 2 * streamed
        return {
            "device": (choice.window + 2) * 2 * longest
            + (6 + state_bytes) * resident
            + self.activations(choice.kept)
            + working,
            "host": gradients + (on_host if choice.store == "ram" else 8 * max(self.elements)),
            "disk": on_host if choice.store == "disk" else 0,
        }


def every_choice(space):
    few = product(space.micro_batches, space.updates, space.states, space.stores, space.residents, space.kepts)
    for micro_batch, update, states, store, resident, kept in few:
        for window in space.windows_beside(resident):
            yield Choice(
                window=window,
                resident=resident,
                kept=kept,
                micro_batch=micro_batch,
                update=update,
                states=states,
                store=store,
            )


def small_case(seed):
    model = Model(seed, layers=random.Random(seed).randint(2, 5))
    rng = model.rng
    space = Space(
        layers=model.layers,
        residents=range(model.layers),
        kepts=range(model.layers + 1),
        micro_batches=rng.choice(((None,), (None, 2), (2, 1))),
        states=rng.choice((("fp32",), ("fp32", "8bit"))),
        stores=rng.choice((("ram",), ("ram",), ("disk",))),
    )
    least, most = ({}, {})
    for choice in every_choice(space):
        for place, needed in model.bytes_of(choice).items():
            least[place] = min(needed, least.get(place, needed))
            most[place] = max(needed, most.get(place, needed))
    limits = {place: int(least[place] + rng.uniform(0, 0.8) * (most[place] - least[place])) for place in least}
    return model, space, limits


def fits(model, choice, limits):
    return all(needed <= limits[place] for place, needed in model.bytes_of(choice).items())


@pytest.mark.parametrize("block", range(10))
def test_the_plan_is_within_three_percent_of_the_best_of_all_choices(block):
    worse = []
    for seed in range(20 * block, 20 * block + 20):
        model, space, limits = small_case(seed)
        fitting = [choice for choice in every_choice(space) if fits(model, choice, limits)]
        found = search(space, model.work_of, model.bytes_of, limits)
        assert bool(found.plans) == bool(fitting)
        if not fitting:
            assert found.refused
            continue
        assert all(fits(model, plan.choice, limits) for plan in found.plans)
        works = [model.work_of(choice) for choice in fitting]
        best_s = min(step_time(one.layers, one.machine, one.settings, one.root).step_s for one in works)
        worse.append(found.plans[0].step.step_s / best_s - 1)
    assert max(worse) <= 0.03, sorted(worse)
    assert min(worse) >= -1e-12


@pytest.mark.parametrize("seed", seeds(100, 25))
def test_no_step_is_shorter_than_its_bound(seed):
    work, machine, settings, root = random_step_work(seed, slowed={})
    bound = step_bound(work, machine, settings, root)
    assert 0 < bound.step_s <= step_time(work, machine, settings, root).step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(100, 25))
def test_no_step_with_inputs_on_disk_is_shorter_than_its_bound(seed):
    rng = random.Random(seed)
    work, machine, settings, root = random_step_work(seed, slowed={})
    work = [replace(one, input_bytes=rng.choice((0, 300, 900)), inputs_on_disk=True) for one in work]
    machine = replace(machine, disk_read_bytes_per_s=rng.uniform(20, 500), disk_write_bytes_per_s=rng.uniform(20, 500))
    bound = step_bound(work, machine, settings, root)
    assert 0 < bound.step_s <= step_time(work, machine, settings, root).step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(100, 25))
@pytest.mark.parametrize("large", [1, 30])
def test_no_step_is_shorter_than_its_bound_where_the_device_updates_slowly(seed, large):
    """Beside updates of root parameters on the host, which may be longer."""
    work, machine, settings, root = random_step_work(seed, slowed={})
    root = [replace(one, elements=large * one.elements, weight_bytes=large * one.weight_bytes) for one in root]
    machine = replace(machine, device_update_ns=2 * machine.host_update_ns)
    bound = step_bound(work, machine, settings, root)
    assert 0 < bound.step_s <= step_time(work, machine, settings, root).step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(50, 15))
def test_no_step_is_shorter_than_its_bound_where_several_root_parameters_come_first(seed):
    """In any order, of which some compute before others are updated."""
    rng = random.Random(seed)
    work, machine, settings, root = random_step_work(seed, slowed={})
    elements = max(layer.elements for layer in work) or 100
    more = [
        RootWork(
            first=True,
            forward_s=rng.choice((0.0, work[0].forward_s, 10 * work[0].forward_s)),
            elements=rng.choice((0, elements, 20 * elements)),
            weight_bytes=rng.randint(0, 10 * work[0].weight_bytes),
            resident=rng.random() < 0.3,
        )
        for _ in range(3)
    ]
    bound = step_bound(work, machine, settings, [*more, *root])
    assert bound.step_s <= step_time(work, machine, settings, [*more, *root]).step_s * (1 + 1e-9)


@pytest.mark.parametrize("ring_bytes", [0, 1, 2 * CHUNK_BYTES])
@pytest.mark.parametrize("in_backward", [False, True])
def test_no_step_with_iterations_beside_updates_is_shorter_than_its_bound(in_backward, ring_bytes):
    """Of layers that pass through the ring in one chunk the next one's update goes on beside the iterations."""
    layer = LayerWork(
        forward_s=1,
        backward_s=2,
        weight_bytes=1,
        gradient_bytes=1,
        elements=10**9,
        matrices=2,
        iteration_s=10,
        ring_bytes=ring_bytes,
    )
    machine = Machine(h2d_bytes_per_s=10, d2h_bytes_per_s=10, host_update_ns=1, slowed={})
    work = [layer] * 4, machine, StepSettings(window=2, in_backward=in_backward)
    assert step_bound(*work).step_s <= step_time(*work).step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", seeds(100, 25))
def test_no_step_of_frozen_layers_is_shorter_than_its_bound(seed):
    work, machine, settings, root = random_step_work(seed, slowed={})
    work = [replace(layer, elements=0, gradient_bytes=0) for layer in work]
    bound = step_bound(work, machine, settings, root)
    assert 0 < bound.step_s <= step_time(work, machine, settings, root).step_s * (1 + 1e-9)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
@pytest.mark.parametrize("fetch_s", [0.5, 1.5, 2.5, 9])
def test_a_step_of_frozen_layers_is_its_bound(fetch_s, window):
    """From a link that is faster than both passes to one that is slower than both."""
    layer = LayerWork(forward_s=1, backward_s=2, weight_bytes=1)
    machine = Machine(h2d_bytes_per_s=1 / fetch_s, d2h_bytes_per_s=1, host_update_ns=0, runs_behind=False)
    work = [layer] * 12, machine, StepSettings(window=window)
    assert step_bound(*work).step_s == pytest.approx(step_time(*work).step_s, rel=1e-9)


@pytest.mark.parametrize("seed", seeds(100, 25))
def test_no_step_is_shorter_than_its_bound_where_inputs_wait_beside_the_device(seed):
    """Of some layers or of all, from few bytes to more than weights; and the bound is above that without them."""
    rng = random.Random(seed)
    work, machine, settings, root = random_step_work(seed, slowed={})
    size, some = rng.choice((10, 500, 5000)), rng.random() < 0.5
    inputs = [replace(one, input_bytes=rng.randint(1, size) * (not some or rng.random() < 0.5)) for one in work]
    bound, step = (find(inputs, machine, settings, root) for find in (step_bound, step_time))
    assert step_bound([replace(one, input_bytes=0) for one in work], machine, settings, root).step_s <= bound.step_s
    assert bound.step_s <= step.step_s * (1 + 1e-9)


@pytest.mark.parametrize(("down_s", "up_s"), [(5, 0), (0, 8)])
def test_a_step_of_frozen_layers_whose_inputs_are_longest_is_its_bound(down_s, up_s):
    layer = LayerWork(forward_s=1, backward_s=2, weight_bytes=0, input_bytes=1)
    rates = [1 / one if one else 1e12 for one in (up_s, down_s)]
    machine = Machine(h2d_bytes_per_s=rates[0], d2h_bytes_per_s=rates[1], host_update_ns=0, runs_behind=False)
    work = [layer] * 12, machine, StepSettings(window=2)
    assert step_bound(*work).step_s == pytest.approx(step_time(*work).step_s, rel=1e-9)
    assert step_bound(*work).step_s == pytest.approx(12 * (5 + 2) if down_s else 12 * (1 + 8) + 2, rel=1e-9)


def test_a_hundred_layers_take_few_steps_that_are_played(monkeypatch):
    """A second on a machine at rest, of which a played step of so many layers takes some 20 ms and a bound 0.2 ms."""
    played, bounded = [], []
    monkeypatch.setattr(search_module, "step_time", lambda *work: played.append(work) or step_time(*work))
    monkeypatch.setattr(search_module, "step_bound", lambda *work: bounded.append(work) or step_bound(*work))
    model = Model(1, layers=100)
    space = Space(
        layers=100,
        residents=range(100),
        kepts=range(101),
        micro_batches=(None, 2, 1),
        states=("fp32", "8bit"),
        stores=("ram", "disk"),
    )
    limits = {"device": 2_000_000, "host": 20_000_000}
    found = search(space, model.work_of, model.bytes_of, limits)
    assert len(played) < 10
    assert len(bounded) < 5000
    assert fits(model, found.plans[0].choice, limits | {"disk": 10**12})


@pytest.mark.parametrize("seed", [1, 3, 4, 5, 6])
def test_a_micro_batch_that_computes_for_longer_than_the_best_step_is_not_asked_about(seed):
    model, space, limits = small_case(seed)
    space = replace(space, micro_batches=(None, 2, 1))
    whole = search(replace(space, micro_batches=(None,)), model.work_of, model.bytes_of, limits)
    asked = []

    def work_of(choice):
        asked.append(choice.micro_batch)
        return model.work_of(choice)

    def least_s(micro_batch):
        return {None: 0.0, 2: whole.plans[0].step.step_s, 1: 0.0}[micro_batch]

    found = search(space, work_of, model.bytes_of, limits, count=1, least_s_of=least_s)
    assert 2 not in asked and 1 in asked
    assert found.plans[0].step.step_s <= whole.plans[0].step.step_s


def test_of_many_numbers_of_resident_layers_few_are_asked_about_until_one_fits():
    """Half of them have too many for the device, and a quarter too few for the host."""
    asked = []

    def bytes_of(choice):
        asked.append(choice.resident)
        return {"device": choice.resident, "host": 1000 - choice.resident}

    model, space = Model(1, layers=4), Space(layers=1000, windows=(1,), residents=range(1001), updates=("deferred",))
    found = search(space, model.work_of, bytes_of, {"device": 500, "host": 750}, count=1)
    assert min(asked) == 0 and max(asked) == 1000
    assert {250, 500} <= set(asked) and len(set(asked)) < 80
    assert 250 <= found.plans[0].choice.resident <= 500


def test_where_nothing_fits_it_says_of_which_place_how_much_is_lacking():
    model = Model(0, layers=4)
    found = search(Space(layers=4), model.work_of, model.bytes_of, {"device": 10})
    assert found.plans == []
    assert {refusal.place for refusal in found.refused} == {"device"}
    least = Choice(window=1)
    assert found.refused[0].choice._replace(update="deferred") == least
    assert (found.refused[0].needed_bytes, found.refused[0].limit_bytes) == (model.bytes_of(least)["device"], 10)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_refused_does_not_fit_and_may_be_better(seed):
    model, space, limits = small_case(seed)
    found = search(space, model.work_of, model.bytes_of, limits, count=2)
    assert found.plans or found.refused
    for refusal in found.refused:
        work = model.work_of(refusal.choice)
        assert refusal.needed_bytes == model.bytes_of(refusal.choice)[refusal.place] > refusal.limit_bytes
        assert refusal.limit_bytes == limits[refusal.place]
        bound = step_bound(work.layers, work.machine, work.settings, work.root)
        assert not found.plans or bound.step_s < found.plans[0].step.step_s


def test_only_what_is_allowed_is_chosen():
    model = Model(0, layers=4)
    space = Space(layers=4, windows=(2,), residents=(1,), kepts=(3,), updates=("deferred",), micro_batches=(2,))
    (plan,) = search(space, model.work_of, model.bytes_of, {}).plans
    assert plan.choice == Choice(window=2, resident=1, kept=3, micro_batch=2)
    assert plan.bytes_by_place == model.bytes_of(plan.choice)


def test_the_best_plans_come_in_order():
    model = Model(3, layers=6)
    space = Space(layers=6, residents=range(6), kepts=range(7))
    found = search(space, model.work_of, model.bytes_of, {}, count=4)
    seconds = [plan.step.step_s for plan in found.plans]
    assert len(seconds) == 4
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("seed", range(12))
def test_what_cannot_be_shorter_than_a_rival_is_hardly_played(seed, monkeypatch):
    model, space, limits = small_case(seed)
    alone = search(space, model.work_of, model.bytes_of, limits)
    played = []
    monkeypatch.setattr(search_module, "step_time", lambda *work: played.append(work) or step_time(*work))
    beaten = search(space, model.work_of, model.bytes_of, limits, rival_s=1e-9)
    assert len(played) == len(beaten.plans) == bool(alone.plans)
    assert all(fits(model, plan.choice, limits) for plan in beaten.plans)
    if alone.plans:
        best_s = alone.plans[0].step.step_s
        near = search(space, model.work_of, model.bytes_of, limits, rival_s=best_s * 1.001)
        assert near.plans[0].step.step_s <= best_s

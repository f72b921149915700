"""Bytes by kinds of units, beside sums over the units one by one."""

import random
from dataclasses import replace

import pytest

from stronghold.planner.model_bytes import ModelBytes, UnitBytes
from stronghold.planner.step_bytes import Buffers, Placed, step_bytes
from tests.crossed import seeds

BUFFERS = Buffers(gradient_slots=2, disk_buffers=3, ring_slots=4, ring_slot_bytes=250)


def random_unit(rng, is_root=False):
    elements = rng.randint(1, 50) * 100
    gradients = rng.choice((0, 2 * elements))
    return UnitBytes(
        weights=2 * elements,
        trained_elements=elements if gradients else 0,
        slot=2 * elements + 64,
        remainders=gradients,
        gradients=gradients,
        gradient_slot=gradients + bool(gradients) * 64,
        moments={"fp32": 4 * gradients, "8bit": gradients},
        directions=rng.randint(0, 50),
        is_root=is_root,
        is_copied=is_root and rng.random() < 0.7,
        on_device=rng.randint(1, 5000) if is_root else 0,
        root_gradient=rng.randint(0, 50) if is_root else 0,
        is_shared=is_root and rng.random() < 0.3,
        sums=gradients if rng.random() < 0.5 else 0,
    )


def random_model(rng):
    layers, root = ([random_unit(rng, is_root) for _ in range(2)] for is_root in (False, True))
    for units in (layers, root):  # which differ in one thing from another
        units.append(replace(units[0], slot=units[0].slot + 1, on_device=7))
        units.append(replace(units[0], moments={"fp32": 1, "8bit": 2}))
    return ModelBytes(
        layers=[replace(rng.choice(layers)) for _ in range(rng.randint(1, 12))],
        root=[replace(rng.choice(root)) for _ in range(rng.randint(0, 4))],
        buffers=rng.randint(0, 100),
        is_host=rng.random() < 0.3,
    )


@pytest.mark.parametrize("seed", seeds(40, 12))
def test_what_units_take_is_the_sum_over_them_one_by_one(seed):
    rng = random.Random(seed)
    model = random_model(rng)
    resident = frozenset(number for number in range(len(model.units)) if rng.random() < 0.4)
    apart = [(number, unit) for number, unit in enumerate(model.units) if number not in resident]
    layers, root = ([unit for _, unit in apart if unit.is_root == is_root] for is_root in (False, True))
    streamed = model.streamed(resident)
    assert streamed.layers == len(layers)
    assert streamed.slot == max((unit.slot for unit in layers), default=0)
    assert streamed.gradient_slot == max((unit.gradient_slot for unit in layers), default=0)
    assert streamed.root == sum(unit.on_device for unit in root)
    beside = sum(unit.sums for unit in root if unit.is_copied)
    assert streamed.resident == beside + sum(model.units[number].resident("fp32") for number in resident)

    states, in_backward, replicas = rng.choice(("fp32", "8bit")), rng.random() < 0.5, rng.choice((1, 3))
    on_disk = {number: frozenset(rng.sample(("weights", "remainders", "moments"), 2)) for number, _ in apart[:3]}
    for there in ({}, on_disk):
        placed = Placed(window=2, resident=resident, on_disk=there)
        found = step_bytes(model, placed, BUFFERS, states=states, in_backward=in_backward, replicas=replicas)
        held = {
            part: sum(unit.part(part, states) for n, unit in apart if part not in there.get(n, ()))
            for part in ("weights", "remainders", "moments")
        }
        kept = 0 if in_backward else sum(unit.gradients for unit in layers)
        staging = 2 * max((unit.gradients for unit in layers), default=0)
        if not model.is_host:
            staging += 3 * max((unit.slot for n, unit in apart if "weights" in there.get(n, ())), default=0)
        copied = sum(unit.gradients for unit in root if unit.is_copied)
        ring = any("moments" in there.get(n, ()) and unit.trained for n, unit in apart)
        pages = sum(-(-unit.part(part, states) // 4096) * 4096 for n, unit in apart for part in there.get(n, ()))
        assert found.pinned == (held["weights"] + kept + copied) // replicas + staging
        sums, own = sum(unit.sums for unit in layers), [u for u in root if not (u.is_copied and u.is_shared)]
        assert found.pageable == (held["remainders"] + held["moments"] + sums) // replicas + 1000 * ring + sum(
            unit.sums for unit in own
        )
        assert found.disk == pages // replicas
        given_up = in_backward and replicas == 1
        assert found.resident == beside + sum(
            unit.resident(states) - (unit.gradients + unit.sums if given_up and not unit.is_root else 0)
            for unit in map(model.units.__getitem__, resident)
        )
        assert found.slots == min(2, len(layers)) * max((unit.slot for unit in layers), default=0)


def test_the_units_of_both_sets_are_the_same_set_each_time():
    model = random_model(random.Random(1))
    some = frozenset((0,))
    assert model.joined(some, [1, 2]) == {0, 1, 2}
    assert model.joined(some, [1, 2]) is model.joined(frozenset((0,)), (1, 2))

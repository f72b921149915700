"""Bytes on paper beside what the engine's report counts, to the byte."""

import random

import pytest
import torch

import stronghold
from stronghold.engine import engine_of, offload_shared
from stronghold.engine.planning.model_memory import ModelMemory
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.planner.choices import Choice
from stronghold.planner.disk_parts import UNKNOWN, Known
from stronghold.planner.step_bytes import spread
from tests.crossed import seeds
from tests.delayed import Apart
from tests.replicas import in_threads
from tests.small import Decoder, Frozen
from tests.small_ring import make_the_ring_small


def built(rng: random.Random) -> torch.nn.Module:
    kind = rng.choice(("gpt", "gpt", "gpt", "frozen", "decoder"))
    if kind != "gpt":
        return {"frozen": Frozen, "decoder": Decoder}[kind]()
    heads = rng.choice((1, 4))
    config = GPTConfig(
        layers=rng.randint(2, 6),
        hidden=heads * rng.choice((8, 24, 36)),
        heads=heads,
        sequence=rng.choice((8, 24)),
        vocabulary=rng.randint(40, 300),
    )
    return GPT(config)


@pytest.mark.parametrize("seed", seeds(150, 30))
def test_bytes_are_those_of_the_report(seed, tmp_path):
    """Of random models, settings, budgets and devices; that of the model on the meta device, too."""
    rng = random.Random(seed)
    model, apart = built(rng), rng.random() < 0.6
    memory = ModelMemory(model, dtype=(dtype := rng.choice((torch.float32, torch.bfloat16))), is_host=not apart)
    count = len(memory.units.layers)
    resident = rng.randint(0, count)
    choice = Choice(
        window=rng.randint(1, max(1, count - resident)),
        resident=resident,
        update=rng.choice(("deferred", "in_backward")),
        states=rng.choice(("fp32", "8bit")),
        store=rng.choice(("ram", "disk")),
    )
    room = sum(unit.resident() for unit in memory.of(choice).units)
    device_memory = room * 3 + rng.randint(0, room) if rng.random() < 0.5 else None
    if resident == 0 and choice.store == "ram" and device_memory is None:
        device_memory = 100 * room  # without a budget, offload has all layers in place on the CPU
    budget = memory.placed(choice, device_memory=device_memory, host_memory=None)
    full = memory.taken(choice, budget)
    host_memory = None
    if choice.store == "disk" and rng.random() < 0.5:
        host_memory = full.pinned + full.pageable + rng.randint(0, full.disk)
    told, known = {}, UNKNOWN
    if rng.random() < 0.5:  # for which optimizer units are placed
        told = {"update": choice.update, "states": choice.states}
        known = Known(choice.update == "in_backward", choice.states)
    placed = memory.placed(choice, device_memory=device_memory, host_memory=host_memory, known=known)
    said = memory.taken(choice, placed)

    stronghold.offload(
        model,
        device=Apart() if apart else "cpu",
        dtype=dtype,
        window=choice.window,
        resident=choice.resident,
        store="ram" if choice.store == "ram" else tmp_path / "store",
        device_memory=device_memory,
        host_memory=host_memory,
        **told,
    )
    optimizer = stronghold.AdamW(model.parameters(), states=choice.states, update=choice.update)
    report, engine = stronghold.report(model), engine_of(model)
    units = [*engine.layers, *(unit for unit in engine.units if unit.is_root)]
    assert {n for n, unit in enumerate(units) if unit.resident} == placed.resident
    assert {n: unit.on_disk for n, unit in enumerate(units) if unit.on_disk} == {
        n: p for n, p in placed.on_disk.items() if p
    }
    assert said.slots == report.slots_device_bytes
    assert said.gradients == report.gradients_device_bytes
    assert said.root == report.root_device_bytes
    assert said.resident == report.resident_device_bytes
    assert said.root_gradients == report.root_gradients_device_bytes
    assert said.host == report.host_bytes
    assert said.disk == report.disk_bytes
    del optimizer
    stronghold.close(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_ram_is_filled_by_the_optimizer_that_is_known(update, states, dtype):
    """To the last unit that fits; of another one room is left for gradients and for moments in fp32."""
    config = GPTConfig(layers=12, hidden=1024, heads=2, sequence=8, vocabulary=100)
    with torch.device("meta"):
        memory = ModelMemory(GPT(config), dtype=dtype, is_host=False)
    choice = Choice(window=2, update=update, states=states, store="disk")
    known = Known(update == "in_backward", states)
    all_on_disk = memory.taken(choice, memory.placed(choice, device_memory=0, host_memory=None, known=known))
    host_memory = all_on_disk.host + all_on_disk.disk * 2 // 3

    def left(known=UNKNOWN):
        placed = memory.placed(choice, device_memory=0, host_memory=host_memory, known=known)
        return host_memory - memory.taken(choice, placed).host, placed

    room, placed = left(known)
    layer = memory.of(choice).layers[0]
    smallest = layer.remainders + layer.moments[states]
    assert 0 <= room < smallest and any(placed.on_disk.values())
    if (update, states) != ("deferred", "fp32"):
        assert left()[0] > room + smallest
    assert left(Known(states="fp32")) == left()


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_where_all_fits_there_is_no_ring_and_states_stay_where_weights_do(states):
    """In fp32 a layer's moments of 8 bits are less than its weights: they do not stay where those have no room."""
    config = GPTConfig(layers=12, hidden=1024, heads=2, sequence=8, vocabulary=100)
    with torch.device("meta"):
        memory = ModelMemory(GPT(config), is_host=False)
    choice = Choice(window=2, states=states, store="disk")

    def placed(host_memory):
        placed = memory.placed(choice, device_memory=0, host_memory=host_memory, known=Known(states=states))
        return placed, memory.taken(choice, placed).host

    def parts(host_memory):
        there, taken = placed(host_memory)
        assert taken <= host_memory
        return [one for one in there.on_disk.values() if one]

    (_, needed), (_, least) = placed(2**40), placed(0)
    assert parts(needed) == []
    for less in range(1, needed - least, 2**20):
        assert (there := parts(needed - less))
        assert all("moments" in one for one in there), less


def test_layers_stay_evenly_spread():
    assert spread(8, 3) == [0, 2, 5]
    assert spread(5, 5) == [0, 1, 2, 3, 4]
    assert spread(5, 0) == []


@pytest.mark.parametrize("store", ["ram", "disk", "some"])
@pytest.mark.parametrize("apart", [True, False])
def test_each_of_two_replicas_counts_half_of_what_both_have(apart, store, tmp_path, monkeypatch):
    """Gradients of root parameters with it, where these have a copy on the device."""
    make_the_ring_small(monkeypatch)
    config = GPTConfig(layers=8, hidden=32, heads=2, sequence=8, vocabulary=100)
    memory = ModelMemory(GPT(config), is_host=not apart, replicas=2)
    choice = Choice(window=2, store="ram" if store == "ram" else "disk")
    full = memory.taken(choice, memory.placed(choice, device_memory=None, host_memory=None))
    host_memory = full.host + full.disk // 2 if store == "some" else None
    placed = memory.placed(choice, device_memory=None, host_memory=host_memory)
    said = memory.taken(choice, placed)
    models = [GPT(config) for _ in range(2)]

    def reported(replicas):
        model, where = models[replicas.local_rank], "ram" if store == "ram" else tmp_path / "store"
        device = Apart() if apart else "cpu"
        offload_shared(model, replicas, device=device, window=2, store=where, host_memory=host_memory)
        optimizer = stronghold.AdamW(model.parameters())
        return optimizer, stronghold.report(model)

    found = in_threads(2, reported)
    for _, report in found:
        assert said.host == report.host_bytes
        assert said.disk == report.disk_bytes
    if store == "some":
        assert 0 < said.disk < full.disk
        assert said.host <= host_memory
    for model in models:
        stronghold.close(model)

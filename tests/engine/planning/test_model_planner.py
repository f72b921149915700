"""What a step of a choice consists of, found once for layers that are alike."""

import random
from itertools import count

import pytest
import torch

from stronghold.engine.planning.memory_limits import Limits
from stronghold.engine.planning.model_planner import ModelPlanner
from stronghold.engine.planning.searched import PlannedModel
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.planner.choices import Choice
from stronghold.planner.model_bytes import ModelBytes
from tests.planner.machines import about, laptop, machine

LAYERS = 5
DISK = dict.fromkeys(("read", "write", "read_beside_write", "write_beside_read"), about(1e9))


def planned(given, by_muon):
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=LAYERS, hidden=32, heads=4, sequence=16, vocabulary=100))
    model.layers[1].requires_grad_(False)
    model.layers[3].up.requires_grad_(False)
    ids = torch.empty((4, 16), dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids}
    return PlannedModel(model, given, inputs, layers=None, dtype=None, directories=["/d"], by_muon=by_muon)


@pytest.mark.parametrize("by_muon", [False, True])
@pytest.mark.parametrize("of", [machine, laptop])
def test_the_work_of_a_layer_is_what_it_is_where_each_is_asked_about_by_itself(of, by_muon, monkeypatch):
    given = of(disks={"/d": DISK})
    one = planned(given, by_muon)
    limits = Limits(device=None if given.is_host else 2**19, host=2**20, process=0)
    rng, choices = random.Random(0), []
    for _ in range(10):
        resident = rng.randint(0, LAYERS)
        choices.append(
            Choice(
                window=rng.randint(1, max(1, LAYERS - resident)),
                resident=resident,
                kept=rng.randint(0, LAYERS),
                micro_batch=rng.choice((None, 2)),
                update=rng.choice(("deferred", "in_backward")),
                states="muon" if by_muon else rng.choice(("fp32", "8bit")),
                store=rng.choice(("ram", "disk")),
            )
        )
    planner = ModelPlanner(one.memory, one.computation, given, limits, ["/d"])
    found = [planner.work_of(choice) for choice in choices]
    numbers = count()
    monkeypatch.setattr(ModelBytes, "kind_of", lambda *_: next(numbers))
    for choice, work in zip(choices, found, strict=True):
        alone = ModelPlanner(one.memory, one.computation, given, limits, ["/d"])
        assert work == alone.work_of(choice)
        assert [layer.recomputed for layer in work.layers] == [n < LAYERS - choice.kept for n in range(LAYERS)]
        assert planner.bytes.of(choice) == alone.bytes.of(choice)
    assert len({id(layer) for work in found for layer in work.layers}) < len(found) * LAYERS

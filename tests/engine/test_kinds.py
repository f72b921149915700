"""Models of many kinds train as plain PyTorch trains them, with every way to keep activations and every window."""

import pytest

from stronghold.engine import engine_of, keep_activations
from tests.crossed import crossed
from tests.small import KINDS, follow, ordinary_loop

ACTIVATIONS = ("recompute", "keep", "host")


@pytest.mark.parametrize(("kind", "activations", "window"), crossed(list(KINDS), ACTIVATIONS, ("1", "2", "all")))
def test_every_kind_trains_as_plain_pytorch_does(kind, activations, window):
    build, batches, layers = KINDS[kind].build, KINDS[kind].batches, KINDS[kind].layers
    model = build()
    count = {
        "chain": 4,
        "mixed": 7,
        "structured": 3,
        "encoder_decoder": 6,
        "frozen": 5,
        "lending": 3,
        "torch_encoder": 3,
    }.get(kind, 4)
    assert sum(1 for _ in model.modules()) > count
    follow(
        build,
        batches(3),
        activations=activations,
        window=count if window == "all" else int(window),
        layers=layers,
    )


@pytest.mark.parametrize(("kind", "activations", "first"), crossed(list(KINDS), ("recompute", "host"), (0, 1)))
def test_every_kind_trains_so_where_every_second_layer_keeps_activations(kind, activations, first):
    def loop(model, optimizer, batches):
        if (engine := engine_of(model)) is not None:
            keep_activations(engine, [block.module for block in engine.blocks[first::2]])
        return ordinary_loop(model, optimizer, batches)

    known = KINDS[kind]
    follow(known.build, known.batches(3), loop, activations=activations, window=1, layers=known.layers)

"""Every scheduler of torch.optim.lr_scheduler drives this optimizer as it drives torch.optim.AdamW."""

import inspect

import pytest
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from tests.small import Residual, follow, numbers

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.2),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.2, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 3)], [2]
    ),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4, 1e-4),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 2), lr_scheduler.ExponentialLR(o, 0.6)]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.2, threshold=10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, 2, cycle_momentum=True),
    "CyclicLR without momentum": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 2e-2, 2, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=8),
    "OneCycleLR without momentum": lambda o: lr_scheduler.OneCycleLR(o, 2e-2, total_steps=8, cycle_momentum=False),
}


def test_there_is_a_case_for_every_scheduler_that_torch_has():
    known = {
        name
        for name, kind in inspect.getmembers(lr_scheduler, inspect.isclass)
        if issubclass(kind, LRScheduler) and not name.startswith("_") and name != "LRScheduler"
    }
    assert known == {name.split()[0] for name in SCHEDULERS}


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, update):
    """Three groups' worth of settings, stepped and, half-way, saved into a new scheduler."""

    def loop(model, optimizer, batches):
        seen = []
        scheduler = SCHEDULERS[name](optimizer)
        for step, batch in enumerate(batches):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
            seen += [loss.detach(), [(float(g["lr"]), *g["betas"]) for g in optimizer.param_groups]]
            if step == 2:
                saved = scheduler.state_dict()
                scheduler = SCHEDULERS[name](optimizer)
                scheduler.load_state_dict(saved)
        assert len({str(item) for item in seen[1::2]}) > 1, "the settings must have changed"
        return seen

    def groups(model):
        return [{"params": model.layers.parameters()}, {"params": model.out.parameters(), "lr": 2e-2}]

    follow(Residual, numbers(6), loop, groups=groups, ours_only={"update": update})

"""Plans of mixtures whose layers do not fit: for parts of as many experts as give the shortest step."""

import pytest
import torch

import stronghold
from stronghold.errors import BudgetError
from stronghold.planner.training_plan import TrainingPlan
from stronghold.probing import facts_of
from tests.engine.planning.test_auto import here, on_a_gpu  # noqa: F401 (here is a fixture)
from tests.experts import EXPERTS, batches, model, train
from tests.planner.machines import machine

CUTS = [None, *(EXPERTS >> shift for shift in range(4))]
INPUTS = dict.fromkeys(("input_ids", "labels"), batches(1)[0])
GIVEN = {"machine": machine(), "inputs": INPUTS, "update": "deferred"}


def by_hand(number, budget):
    """The plan of a model that is cut before it is planned for, None where nothing fits."""
    of = model() if number is None else stronghold.split_experts(model(), number)
    try:
        return stronghold.plan(of, device_memory=budget, **GIVEN)
    except BudgetError:
        return None


@pytest.mark.parametrize(("share", "cut"), [(0.8, None), (0.7, 2), pytest.param(0.33, 1, marks=pytest.mark.long)])
def test_it_is_for_whole_layers_or_for_the_parts_with_the_shortest_step(share, cut, monkeypatch):
    counted = []
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda of: counted.append(of) or 2**28)
    least = stronghold.plan(model(), window=1, resident=0, **GIVEN).device_bytes
    budget = int(share * least)
    plans = {number: by_hand(number, budget) for number in (CUTS if cut else [None])}
    of = model()
    names = [*of.state_dict()]
    found = stronghold.plan(of, device_memory=budget, experts_per_part="auto", **GIVEN)
    assert [*of.state_dict()] == names
    assert counted[-1] is of  # a copy without values would leave the experts to the process
    number = found.experts_per_part
    assert number == cut
    assert (number is None) == (plans[None] is not None)
    assert {**plans[number].settings, **({"experts_per_part": number} if number else {})} == found.settings
    assert (found.step_s, found.device_bytes) == (plans[number].step_s, plans[number].device_bytes)
    if number is not None:
        assert found.step_s.likely == min(plans[n].step_s.likely for n in CUTS if plans[n] and n >= number)
        assert all(one.settings["experts_per_part"] == number for one in (*found.others, *found.refused))


def test_nothing_fits():
    with pytest.raises(BudgetError):
        stronghold.plan(model(), device_memory=1000, experts_per_part="auto", **GIVEN)


def test_offload_follows_it_with_its_settings_or_the_plan_itself(here, tmp_path):  # noqa: F811
    there = machine(device_name=facts_of(torch.device("cpu")).device_name)
    given = {**GIVEN, "machine": there}
    plan = stronghold.plan(model(), experts_per_part=2, window=2, resident=0, **given)
    assert plan.settings["experts_per_part"] == plan.experts_per_part == 2
    assert "experts_per_part" in str(plan)
    plan.write(tmp_path / "plan.json")
    assert TrainingPlan.read(tmp_path / "plan.json").settings == plan.settings
    plain = model()
    steps = batches(3)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), steps)
    for asked in (
        dict(plan.settings),
        {"plan": plan},
        {"plan": tmp_path / "plan.json", "experts_per_part": "auto"},
        {"plan": plan, "experts_per_part": 2},
    ):
        of = on_a_gpu(here, model(), there=there, **asked)
        report = stronghold.report(of)
        assert (report.experts_per_part, report.window) == (2, plan.settings["window"])
        optimizer = stronghold.AdamW(of.parameters(), lr=1e-3, update="deferred")
        losses = train(of, optimizer, steps)
        assert stronghold.report(of).device_bytes == plan.held_device_bytes
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"experts_per_part=4 beside one with 2\); leave out experts_per_part"):
        on_a_gpu(here, model(), there=there, plan=plan, experts_per_part=4)


def test_what_cannot_be_is_refused():
    for number, rule in ((9, "got 9, a layer has 8"), ("most", "a number of experts, 'auto' or None \\(got 'most'")):
        with pytest.raises(ValueError, match=rule):
            stronghold.plan(model(), experts_per_part=number, **GIVEN)
    with pytest.raises(ValueError, match=r"for one process \(got experts_per_part='auto' with processes=2"):
        stronghold.plan(model(), experts_per_part="auto", processes=2, **GIVEN)
    with pytest.raises(ValueError, match="none in Linear"):
        stronghold.plan(torch.nn.Linear(2, 2), experts_per_part=2, **GIVEN)

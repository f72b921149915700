"""experts_per_part="auto": layers of a mixture stay whole where they fit, and else are cut as the budget has room."""

import copy
import logging

import peft
import pytest
import torch

import stronghold
from stronghold.engine.arranging import Asked
from stronghold.engine.experts_that_fit import Fit, cut_to_fit
from stronghold.engine.split_experts import experts_per_part_of
from stronghold.errors import BudgetError, OffloadedModelError
from tests.crossed import crossed
from tests.engine.planning.test_auto import here, on_a_gpu  # noqa: F401 (here is a fixture)
from tests.experts import EXPERTS, FAMILIES, batches, model, train

CUTS = [None, *(EXPERTS >> shift for shift in range(4))]


def window_of(family, number, budget, window):
    """What the window comes to with so many experts a part, 0 where they do not fit."""
    of = model(family) if number is None else stronghold.split_experts(model(family), number)
    try:
        of = stronghold.offload(of, device="cpu", window=window, device_memory=budget)
    except BudgetError:
        return 0
    return stronghold.report(of).window


@pytest.mark.parametrize(("family", "window"), crossed([*FAMILIES], ["auto", 2], together=1))
def test_whole_layers_or_the_most_experts_that_fit(family, window, caplog):
    whole = stronghold.report(stronghold.offload(model(family), device="cpu", window=2)).device_bytes
    seen, steps = set(), batches(1)
    plain = stronghold.offload(model(family), device="cpu", window=1)
    expected_losses = train(plain, stronghold.AdamW(plain.parameters(), lr=1e-3), steps)
    for share in (1.0, 0.7, 0.5, 0.4):
        budget = int(share * whole)
        windows = {number: window_of(family, number, budget, window) for number in CUTS}
        fitting = [number for number in CUTS if windows[number]]
        options = {"device": "cpu", "window": window, "device_memory": budget, "experts_per_part": "auto"}
        of = model(family)
        names = [*of.state_dict()]
        if not fitting:
            with pytest.raises(BudgetError, match=r"(raise device_memory|pass window=1 or less)(?!.*experts)"):
                stronghold.offload(of, **options)
            assert [*of.state_dict()] == names
            continue
        most = max(min(windows[number], 2) for number in fitting)  # a second slot hides fetches
        expected = None if windows[None] else next(n for n in fitting if min(windows[n], 2) == most)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="stronghold"):
            of = stronghold.offload(of, **options)
        report = stronghold.report(of)
        assert (report.experts_per_part, report.window) == (expected, windows[expected])
        assert report.device_bytes <= budget
        assert (f"in parts of up to {expected} experts" in caplog.text) == (expected is not None)
        assert ("experts in a part" in str(report)) == (expected is not None)
        assert train(of, stronghold.AdamW(of.parameters(), lr=1e-3), steps) == expected_losses
        seen.add(expected)
    assert None in seen
    assert len(seen) >= 2


def test_of_cuts_that_fit_the_one_with_the_least_cost_is_taken():
    costs = {8: 3.0, 4: 3.0, 2: 2.0, 1: 2.5}

    def cut(most):
        asked = []

        def fit(of):
            number = experts_per_part_of(of)
            if number is None or number > most:
                raise BudgetError(f"{number} is too many")
            asked.append(number)
            return Fit(costs[number], number)

        of = model()
        names = [*of.state_dict()]
        found = cut_to_fit(of, fit)
        assert [*of.state_dict()] == names
        return found, asked

    assert cut(most=8) == ((2, Fit(2.0, 2)), [8, 4, 2, 1])
    assert cut(most=4) == ((2, Fit(2.0, 2)), [4, 2, 1])
    assert cut(most=1) == ((1, Fit(2.5, 1)), [1])
    with pytest.raises(BudgetError, match="1 is too many"):
        cut(most=0)


def test_where_inputs_are_known_the_planner_says_what_fits_and_which_is_shortest(here, monkeypatch):  # noqa: F811
    (batch,) = batches(1)
    inputs = {"input_ids": batch, "labels": batch}
    with pytest.raises(BudgetError, match="cut a layer's experts apart") as error:
        on_a_gpu(here, model(), inputs=inputs, device_memory=1000)
    budget = error.value.needed["device"] - 1
    with pytest.raises(BudgetError):
        on_a_gpu(here, model(), inputs=inputs, device_memory=budget)
    tried, fit = {}, Asked._fit

    def noted(self, of, whole):
        found = fit(self, of, whole)
        tried[experts_per_part_of(of)] = found.cost
        return found

    monkeypatch.setattr(Asked, "_fit", noted)
    counted, given = [], model()
    monkeypatch.setattr("stronghold.engine.planning.asked.process_bytes", lambda of: counted.append(of) or 2**28)
    of = on_a_gpu(here, given, inputs=inputs, device_memory=budget, experts_per_part="auto")
    assert all(one is given for one in counted)  # a copy without values would leave the experts to the process
    found = stronghold.report(of)
    assert None not in tried
    assert len(tried) > 1
    assert tried[found.experts_per_part] == min(tried.values())
    cut = stronghold.split_experts(model(), found.experts_per_part)
    assert stronghold.report(on_a_gpu(here, cut, inputs=inputs, device_memory=budget)).planned == found.planned
    losses = train(of, stronghold.AdamW(of.parameters(), lr=1e-3), batches(3))
    plain = model()
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), batches(3))
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)


def budget_for(number):
    of = stronghold.offload(stronghold.split_experts(model(frozen=True), number), device="cpu", window=2)
    return stronghold.report(of).device_bytes


def test_a_checkpoint_is_loaded_in_parts_that_fit(tmp_path):
    whole = model()
    whole.save_pretrained(tmp_path / "a")
    options = {"device": "cpu", "window": 1, "device_memory": "68KiB"}
    with pytest.raises(BudgetError):
        stronghold.load(tmp_path / "a", **options)
    of = stronghold.load(tmp_path / "a", store=tmp_path / "store", experts_per_part="auto", **options)
    assert stronghold.report(of).experts_per_part == 2
    assert all(torch.equal(value, of.state_dict()[name]) for name, value in whole.state_dict().items())


def test_adapters_on_attention_leave_experts_to_be_cut_and_those_on_experts_do_not():
    frozen = model(frozen=True)
    budget, steps = budget_for(2), batches(3)

    def adapted(**targets):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=2, init_lora_weights=False, **targets)
        return peft.get_peft_model(copy.deepcopy(frozen).requires_grad_(False), config)

    def losses(of):
        return train(of, stronghold.AdamW([p for p in of.parameters() if p.requires_grad], lr=1e-2), steps)

    options = {"device": "cpu", "window": 2, "device_memory": budget + 2048}
    attention = {"target_modules": ["q_proj", "v_proj"]}
    of = stronghold.offload(adapted(**attention), experts_per_part="auto", **options)
    assert stronghold.report(of).experts_per_part in (1, 2)
    assert losses(of) == losses(stronghold.offload(adapted(**attention), device="cpu", window=2))
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    refused = {
        "auto": (BudgetError, "device_memory; experts with adapters"),
        2: (OffloadedModelError, "no adapters of"),
    }
    for number, (error, rule) in refused.items():
        of = adapted(target_modules=[], target_parameters=names)
        before = [*of.state_dict()]
        with pytest.raises(error, match=rule):
            stronghold.offload(of, experts_per_part=number, **options)
        assert [*of.state_dict()] == before


def test_what_does_not_fit_or_is_no_number_changes_nothing():
    of = model()
    names = [*of.state_dict()]
    with pytest.raises(BudgetError):
        stronghold.offload(of, device="cpu", window=2, experts_per_part=4, device_memory=1000)
    for number, rule in ((9, "got 9, a layer has 8"), ("most", "a number of experts, 'auto' or None .got 'most'")):
        with pytest.raises(ValueError, match=rule):
            stronghold.offload(of, device="cpu", experts_per_part=number)
    assert [*of.state_dict()] == names
    assert stronghold.report(stronghold.offload(of, device="cpu", window=2)).layers == 2

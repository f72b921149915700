"""State dictionaries fit torch.optim.AdamW's in both directions, and what does not fit is refused whole."""

import copy

import pytest
import torch
from torch import nn

import stronghold
from tests.small import (
    ADAMW,
    Residual,
    assert_close,
    assert_same_states,
    assert_unchanged,
    numbers,
    ordinary_loop,
    pair,
    snapshot,
)


def groups(model):
    return [{"params": model.layers.parameters(), "lr": 3e-2}, {"params": model.out.parameters(), "weight_decay": 0.3}]


def optimizer_of(model, kind=stronghold.AdamW, **settings):
    return kind(groups(model), **{**ADAMW, **settings})


@pytest.mark.parametrize("implementation", [{}, {"fused": True}, {"foreach": True}, {"capturable": False}])
@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_training_goes_on_the_same_after_an_exchange_in_both_directions(update, implementation):
    plain, ours = pair(Residual)
    theirs, mine = optimizer_of(plain, torch.optim.AdamW, **implementation), optimizer_of(ours, update=update)
    for model, optimizer in ((plain, theirs), (ours, mine)):
        torch.manual_seed(1)
        ordinary_loop(model, optimizer, numbers(3))
        optimizer.param_groups[1]["lr"] = 0.02

    fresh_plain, fresh_ours = pair(Residual)
    fresh_theirs = optimizer_of(fresh_plain, torch.optim.AdamW, lr=0.5)
    fresh_mine = optimizer_of(fresh_ours, update=update, lr=0.5)
    fresh_plain.load_state_dict(ours.state_dict())
    fresh_theirs.load_state_dict(mine.state_dict())
    fresh_ours.load_state_dict(plain.state_dict())
    fresh_mine.load_state_dict(theirs.state_dict())

    results = []
    for model, optimizer in ((plain, theirs), (fresh_plain, fresh_theirs), (fresh_ours, fresh_mine)):
        torch.manual_seed(2)
        results.append(ordinary_loop(model, optimizer, numbers(3, seed=3)))
    assert_close(results[1], results[0])
    assert_close(results[2], results[0])
    assert_close(dict(fresh_plain.state_dict()), dict(plain.state_dict()))
    assert_close(dict(fresh_ours.state_dict()), dict(plain.state_dict()))
    assert_same_states(fresh_mine, theirs)
    assert_same_states(fresh_theirs, theirs)


def test_the_groups_have_the_same_keys():
    plain, ours = pair(Residual)
    theirs = optimizer_of(plain, torch.optim.AdamW).state_dict()["param_groups"]
    mine = optimizer_of(ours).state_dict()["param_groups"]
    assert [dict(sorted(group.items())) for group in mine] == [dict(sorted(group.items())) for group in theirs]


def test_moments_are_not_rounded_to_the_compute_type():
    """torch.optim.Optimizer.load_state_dict would cast them to the parameters' dtype."""
    plain, ours = pair(Residual, dtype=torch.bfloat16)
    theirs, mine = optimizer_of(plain, torch.optim.AdamW), optimizer_of(ours)
    ordinary_loop(plain, theirs, numbers(2))
    mine.load_state_dict(theirs.state_dict())
    assert_close(mine.state_dict()["state"], theirs.state_dict()["state"], rtol=0, atol=0)
    again = optimizer_of(pair(Residual, dtype=torch.bfloat16)[1])
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    assert_close(again.state_dict(), mine.state_dict(), rtol=0, atol=0)


def test_a_dictionary_may_be_loaded_into_the_optimizer_that_it_is_of():
    _, model = pair(Residual)
    optimizer = optimizer_of(model)
    ordinary_loop(model, optimizer, numbers(2))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


def test_loading_waits_for_the_updates_under_way():
    _, model = pair(Residual)
    optimizer = optimizer_of(model)
    ordinary_loop(model, optimizer, numbers(1))
    saved = copy.deepcopy(optimizer.state_dict())
    model(numbers(1)[0]).backward()
    device = model.out.weight._unit.owner.device
    device.updates.run(lambda: __import__("time").sleep(0.2))
    optimizer.step()
    optimizer.load_state_dict(saved)
    assert_close(optimizer.state_dict(), saved, rtol=0, atol=0)


def test_a_parameter_without_a_state_has_none_afterwards():
    _, model = pair(Residual)
    optimizer = optimizer_of(model)
    ordinary_loop(model, optimizer, numbers(2))
    saved = copy.deepcopy(optimizer.state_dict())
    dropped = saved["state"].pop(3)
    assert dropped["exp_avg"].abs().sum() > 0
    optimizer.load_state_dict(saved)
    assert 3 not in optimizer.state_dict()["state"]
    assert len(optimizer.state_dict()["state"]) == len(saved["state"])


def _without(key):
    def change(saved):
        del saved["param_groups"][0][key]

    return change


def _state(**entries):
    def change(saved):
        saved["state"][1].update(entries)

    return change


def _group(**entries):
    def change(saved):
        saved["param_groups"][0].update(entries)

    return change


BAD = {
    "no groups": (lambda saved: saved.pop("param_groups"), "'state' and 'param_groups'"),
    "no state": (lambda saved: saved.pop("state"), "'state' and 'param_groups'"),
    "one group less": (lambda saved: saved["param_groups"].pop(), "must have this optimizer's parameter groups"),
    "one parameter less": (lambda saved: saved["param_groups"][0]["params"].pop(), "parameter groups"),
    "a state too many": (lambda saved: saved["state"].update({99: saved["state"][0]}), "parameter 99"),
    "a shape": (_state(exp_avg=torch.zeros(3)), r"exp_avg of parameter 1 must be .* \(got \(3,\)"),
    "whole numbers": (_state(exp_avg_sq=torch.zeros(16, dtype=torch.long)), "exp_avg_sq of parameter 1"),
    "no tensor": (_state(exp_avg=3.0), r"exp_avg of parameter 1 .*got float"),
    "a negative step": (_state(step=torch.tensor(-1.0)), "step of parameter 1 must be a whole number"),
    "no step": (_state(step=float("nan")), "step of parameter 1 must be a whole number"),
    "an entry too many": (_state(max_exp_avg_sq=torch.zeros(16)), "another optimizer than AdamW"),
    "an entry too few": (lambda saved: saved["state"][1].pop("exp_avg"), "another optimizer than AdamW"),
    "no learning rate": (_without("lr"), "must have lr"),
    "no betas": (_without("betas"), "without betas"),
    "a bad learning rate": (_group(lr=-1), "lr must be a number, zero or more"),
    "amsgrad": (_group(amsgrad=True), "amsgrad"),
    "maximize": (_group(maximize=True), "maximize"),
    "Adam": (_group(decoupled_weight_decay=False), "decoupled_weight_decay=False"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(name):
    _, model = pair(Residual)
    optimizer = optimizer_of(model)
    ordinary_loop(model, optimizer, numbers(2))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] += 1
    saved["param_groups"][0]["lr"] = 0.7
    change, message = BAD[name]
    change(saved)
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert_unchanged(before, model, optimizer)


def test_what_another_optimizer_saved_is_refused():
    plain, model = pair(Residual)
    for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adam):
        optimizer = optimizer_of(model)
        other = kind(groups(plain), lr=0.1)
        ordinary_loop(plain, other, numbers(1))
        before = snapshot(model, optimizer)
        with pytest.raises(ValueError, match=r"another optimizer than AdamW|Adam's"):
            optimizer.load_state_dict(other.state_dict())
        assert_unchanged(before, model, optimizer)


@pytest.mark.parametrize("bad", [None, 3, [], {"state": {}, "param_groups": None}])
def test_what_is_no_dictionary_is_refused(bad):
    _, model = pair(Residual)
    with pytest.raises(ValueError, match="state dictionary"):
        optimizer_of(model).load_state_dict(bad)


def _pre_load(optimizer, state_dict):
    """Halves what is saved, and gives the groups another learning rate."""
    states = {
        key: {name: value / 2 if value.ndim else value for name, value in state.items()}
        for key, state in state_dict["state"].items()
    }
    return {"state": states, "param_groups": [{**group, "lr": 0.25} for group in state_dict["param_groups"]]}


def _pre_load_in_place(optimizer, state_dict):
    """PyTorch's own example: parameters that are in another order, matched by their names."""
    state_dict["state"] = {len(state_dict["state"]) - 1 - key: state for key, state in state_dict["state"].items()}
    keys = [key for group in state_dict["param_groups"] for key in group["params"]][::-1]
    state_dict["param_groups"] = [{**state_dict["param_groups"][0], "params": keys}]


def _post_load(optimizer):
    """Counts on the states that are there."""
    assert len(optimizer.state) == 3
    for state in optimizer.state.values():
        state["step"] += 2
    optimizer.param_groups[0]["lr"] = 0.125


def _renamed(optimizer, state_dict):
    """Names states as the model does: what is to be saved, not what is held."""
    return {**state_dict, "state": {f"p{n}": {"mine": 1.0, **dict(s)} for n, s in state_dict["state"].items()}}


@pytest.mark.parametrize("pre_hook", [_pre_load, _pre_load_in_place])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_hooks_around_the_load_are_torchs(pre_hook, states):
    """They were called: before with the dictionary that was then not loaded, and behind without the states."""
    plain, ours = pair(lambda: nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))))
    theirs = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for batch in numbers(2):
        plain(batch).square().mean().backward()
        theirs.step()
    saved = stronghold.AdamW(ours.parameters(), states=states, **ADAMW)
    saved.load_state_dict(theirs.state_dict())  # both hold what eight bits hold
    given = copy.deepcopy(saved.state_dict())
    for optimizer in (saved, theirs):
        optimizer.register_load_state_dict_pre_hook(pre_hook)
        optimizer.register_load_state_dict_post_hook(_post_load)
        optimizer.load_state_dict(copy.deepcopy(given))
    assert_close(saved.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert saved.state_dict()["state"][2]["step"] == 4


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_hooks_on_the_dictionary_that_is_saved_see_torchs(states):
    """A hook saw the entries of optimizer.state, and what it returned was taken for those again."""
    plain, ours = pair(Residual)
    theirs, mine = optimizer_of(plain, torch.optim.AdamW), optimizer_of(ours, states=states)
    for model, optimizer in ((plain, theirs), (ours, mine)):
        torch.manual_seed(1)
        ordinary_loop(model, optimizer, numbers(2))
    unhooked = mine.state_dict()["state"]
    seen = []
    for optimizer in (mine, theirs):
        optimizer.register_state_dict_pre_hook(lambda optimizer: seen.append(len(optimizer.state)))
        optimizer.register_state_dict_post_hook(_renamed)
    got, want = mine.state_dict(), theirs.state_dict()
    assert seen[0] == seen[1]
    assert_close(got["state"], {f"p{n}": {"mine": 1.0, **state} for n, state in unhooked.items()}, rtol=0, atol=0)
    assert got["state"].keys() == want["state"].keys()
    for name, state in want["state"].items():
        assert {key: type(value) for key, value in got["state"][name].items()} == {
            key: type(value) for key, value in state.items()
        }


def test_a_load_that_a_hook_refuses_changes_nothing():
    _, model = pair(Residual)
    optimizer = optimizer_of(model)
    ordinary_loop(model, optimizer, numbers(1))
    saved, before = copy.deepcopy(optimizer.state_dict()), snapshot(model, optimizer)
    handle = optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: {"state": {}})
    with pytest.raises(ValueError, match="must have 'state' and 'param_groups'"):
        optimizer.load_state_dict(saved)
    handle.remove()
    assert_unchanged(before, model, optimizer)
    assert not optimizer._optimizer_load_state_dict_post_hooks
    optimizer.load_state_dict(saved)
    assert_unchanged(before, model, optimizer)

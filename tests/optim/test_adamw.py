"""The optimizer's face is torch.optim.AdamW's: groups, clipping, closures, state, and what it refuses."""

import copy
import io
import pickle
import time
from collections import Counter

import pytest
import torch

import stronghold
from stronghold.errors import NonFiniteGradientError, OffloadedModelError
from stronghold.optim.change import AdamWChange
from stronghold.split import rounded
from tests.small import (
    ADAMW,
    Experts,
    Frozen,
    Residual,
    assert_close,
    assert_same_models,
    assert_same_states,
    assert_unchanged,
    follow,
    numbers,
    ordinary_loop,
    pair,
    snapshot,
)

BOTH = pytest.mark.parametrize("update", ["deferred", "in_backward"])


def groups(model):
    """Three groups: decay by dimensions, and the head with settings of its own."""
    inner = [p for name, p in model.named_parameters() if not name.startswith("out")]
    return [
        {"params": [p for p in inner if p.ndim > 1]},
        {"params": [p for p in inner if p.ndim <= 1], "weight_decay": 0.0, "betas": (0.8, 0.99)},
        {"params": model.out.parameters(), "lr": 3e-2, "eps": 1e-3},
    ]


def offloaded(update="deferred", **settings):
    _, model = pair(Residual)
    return model, stronghold.AdamW(model.parameters(), **{**ADAMW, "update": update, **settings})


@BOTH
def test_groups_have_their_own_settings(update):
    follow(Residual, numbers(4), groups=groups, ours_only={"update": update})


def test_groups_may_be_named_parameters():
    follow(Residual, numbers(3), groups=lambda model: list(model.named_parameters()))


@BOTH
def test_a_learning_rate_that_is_a_tensor(update):
    follow(Residual, numbers(3), adamw={**ADAMW, "lr": torch.tensor(0.02)}, ours_only={"update": update})


@BOTH
def test_groups_added_in_mid_training(update):
    def loop(model, optimizer, batches):
        losses = ordinary_loop(model, optimizer, batches[:2])
        optimizer.add_param_group({"params": list(model.out.parameters()) + list(model.layers[1].parameters())})
        optimizer.param_groups[-1]["lr"] = 0.05
        optimizer.zero_grad()  # of these too, whose gradients nobody has used
        return losses + ordinary_loop(model, optimizer, batches[2:])

    def some(model):
        return [p for n, p in model.named_parameters() if not n.startswith(("out", "layers.1."))]

    follow(Residual, numbers(4), loop, groups=some, ours_only={"update": update})


def test_parameters_that_no_group_has_keep_their_gradients():
    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    model, _ = follow(Residual, numbers(3), loop, groups=lambda model: model.layers[1].parameters())
    assert model.out.weight.grad is not None


def test_settings_are_those_at_the_time_of_step():
    """The update runs on behind the step, and a scheduler changes the group at once."""
    model, optimizer = offloaded()
    plain, _ = pair(Residual)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    batch = numbers(1)[0]
    for one, each in ((plain, expected), (model, optimizer)):
        one.eval()
        one(batch).backward()
        if one is model:
            one.layers[0].up.weight._unit.owner.device.updates.run(lambda: time.sleep(0.3))
        each.step()
        each.param_groups[0].update(lr=100.0, betas=(0.0, 0.0), eps=7.0, weight_decay=0.9)
    assert_same_models(model, plain)


@BOTH
def test_a_closure_is_called_with_gradients_enabled(update):
    def loop(model, optimizer, batches):
        def closure():
            optimizer.zero_grad()
            loss = model(batch)
            loss.backward()
            return loss

        losses = []
        for batch in batches:  # noqa: B007 the closure reads it
            with torch.no_grad():
                losses.append(optimizer.step(closure).detach())
        optimizer.zero_grad()
        return losses

    follow(Residual, numbers(4), loop, ours_only={"update": update})


@BOTH
def test_a_step_may_be_taken_in_inference_mode(update):
    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            with torch.inference_mode():
                optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    follow(Residual, numbers(4), loop, ours_only={"update": update})


@pytest.mark.parametrize("norm", [0.02, 1e6])
def test_max_grad_norm_is_clip_grad_norm(norm):
    seen = []

    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            if isinstance(optimizer, stronghold.AdamW):
                seen.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    follow(Residual, numbers(4), loop, ours_only={"max_grad_norm": norm})
    assert all((length > norm) == (norm < 1) for length in seen), "the gradients must be clipped for this test to tell"


@BOTH
def test_hooks_around_the_step(update):
    def loop(model, optimizer, batches):
        seen = []
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append("before"))
        optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs: seen.append(model.layers[0].up.weight.detach().clone())
        )
        ordinary_loop(model, optimizer, batches)
        return seen

    follow(Residual, numbers(3), loop, ours_only={"update": update})


def test_the_state_is_keyed_by_parameter_and_complete_when_read():
    model, optimizer = offloaded()
    model(numbers(1)[0]).backward()
    weight = model.layers[0].up.weight
    weight._unit.owner.device.updates.run(lambda: time.sleep(0.2))
    optimizer.step()
    state = optimizer.state[weight]
    assert state["step"] == 1
    assert state["exp_avg"].abs().sum() > 0
    assert state["exp_avg"].shape == weight.shape


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_torchs_own_optimizers_work_on_an_offloaded_model(optimizer_class, foreach):
    plain, model = pair(Residual)
    results = []
    for one in (plain, model):
        torch.manual_seed(3)
        results.append(ordinary_loop(one, optimizer_class(one.parameters(), lr=0.1, foreach=foreach), numbers(4)))
    assert_close(results[1], results[0])
    assert_same_models(model, plain)


def test_bf16_compute_keeps_an_exact_fp32_master():
    """Updates far below a bf16 weight's last place add up in the master; the weights are its rounding."""
    _, model = pair(Residual, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
    masters = {n: p.float() for n, p in model.named_parameters()}
    fresh, _ = pair(Residual)
    masters = {n: p.detach().clone().requires_grad_() for n, p in fresh.named_parameters()}
    expected = torch.optim.AdamW(masters.values(), lr=1e-5, weight_decay=0.0)
    model.eval()
    for batch in numbers(12):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, rounded(masters[name].detach())), name
        model(batch.bfloat16()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype is torch.bfloat16
            masters[name].grad = parameter.grad.float()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    assert_same_states(optimizer, expected, rtol=1e-4, atol=1e-9)
    moment = optimizer.state[model.layers[0].up.weight]["exp_avg"]
    assert moment.dtype is torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())


def test_writes_reach_the_bf16_master():
    _, model = pair(Residual, dtype=torch.bfloat16)
    optimizer = stronghold.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    fresh, _ = pair(Residual)
    written = [(model.layers[1].up.weight, fresh.layers[1].up.weight), (model.out.weight, fresh.out.weight)]
    for parameter, _ in written:
        with torch.no_grad():
            parameter[0, 0] = 0.5
    model(numbers(1)[0].bfloat16()).backward()
    optimizer.step()
    for parameter, before in written:
        unit, index = parameter._unit, parameter._index
        optimizer.wait()
        expected = before.detach().clone()
        expected[0, 0] = 0.5
        assert torch.equal(unit.master(index), expected), "what was written, and the low bits of all else"


# What is refused.


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_cannot_be_copied(copied):
    _, optimizer = offloaded()
    with pytest.raises(OffloadedModelError, match=r"state_dict\(\)"):
        copied(optimizer)


def test_parameters_must_be_of_one_offloaded_model():
    plain, one = pair(Residual)
    _, other = pair(Residual)
    for parameters in (
        plain.parameters(),
        [*one.parameters(), *other.parameters()],
        [*one.parameters(), *plain.parameters()],
        [{"params": one.parameters()}, {"params": other.out.parameters()}],
    ):
        with pytest.raises(OffloadedModelError, match="one offloaded model"):
            stronghold.AdamW(parameters)
    optimizer = stronghold.AdamW(one.layers.parameters())
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OffloadedModelError, match="another"):
        optimizer.add_param_group({"params": other.out.parameters()})
    assert_close(optimizer.state_dict(), before)
    with pytest.raises(ValueError, match="empty parameter list"):
        stronghold.AdamW([])
    with pytest.raises(TypeError, match="must be tensors"):
        stronghold.AdamW([3])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": one.layers[0].parameters()})
    stronghold.AdamW(one.parameters())  # nothing of the above has left a trace


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a number, zero or more"),
        ({"lr": float("nan")}, "lr must be a number, zero or more"),
        ({"betas": (1.0, 0.9)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": (0.9, -0.1)}, r"betas must be two numbers in \[0, 1\)"),
        ({"betas": 0.9}, "betas must be"),
        ({"eps": -1e-8}, "eps must be a number, zero or more"),
        ({"weight_decay": -0.1}, "weight_decay must be a number, zero or more"),
        ({"states": "fp16"}, "states must be 'fp32' or '8bit'"),
        ({"update": "later"}, "update must be 'deferred' or 'in_backward'"),
        ({"nonfinite": "ignore"}, "nonfinite must be 'raise' or 'skip'"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be a positive number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a positive number"),
        ({"max_grad_norm": 1.0, "update": "in_backward"}, "use update='deferred'"),
        ({"threads": 0}, "threads must be a whole number of at least 1"),
        ({"threads": 2.5}, "threads must be a whole number of at least 1"),
        ({"lr": None}, "lr must be a number, zero or more .got None"),
        ({"lr": "1e-3"}, "lr must be a number"),
        ({"lr": torch.ones(2)}, "lr must be a number"),
        ({"lr": float("inf")}, "lr must be a number"),
        ({"betas": ("a", "b")}, "betas must be two numbers"),
        ({"eps": "x"}, "eps must be a number"),
        ({"weight_decay": None}, "weight_decay must be a number"),
        ({"max_grad_norm": "1"}, "max_grad_norm must be a positive number"),
    ],
)
def test_settings_out_of_range(settings, message):
    _, model = pair(Residual)
    with pytest.raises(ValueError, match=message):
        stronghold.AdamW(model.parameters(), **settings)
    stronghold.AdamW(model.parameters(), update="in_backward")


def test_settings_of_a_group_out_of_range():
    model, optimizer = offloaded()
    _, other = pair(Residual)
    optimizer = stronghold.AdamW(other.layers.parameters())
    for setting in ({"lr": -1}, {"betas": (2, 0)}, {"amsgrad": True}, {"decoupled_weight_decay": False}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            optimizer.add_param_group({"params": other.out.parameters(), **setting})
        with pytest.raises(ValueError, match=next(iter(setting))):
            stronghold.AdamW([{"params": model.parameters(), **setting}])
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["layers.2.up.weight", "out.bias", "into.weight"])
def test_gradients_that_are_not_finite_change_nothing(where, bad):
    """Refused or skipped, as the user chose; steps go on afterwards as if there had been none."""
    for first in (True, False):
        plain, _ = pair(Residual)
        expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
        for nonfinite in ("raise", "skip"):
            model, optimizer = offloaded(nonfinite=nonfinite)
            if not first:
                torch.manual_seed(1)
                ordinary_loop(model, optimizer, numbers(2))
            model(numbers(1)[0]).backward()
            model.get_parameter(where).grad.view(-1)[-1] = bad
            before = snapshot(model, optimizer)
            if nonfinite == "raise":
                with pytest.raises(NonFiniteGradientError, match=r"must be finite .* nothing was updated"):
                    optimizer.step()
            else:
                optimizer.step()
            assert_unchanged(before, model, optimizer)
            assert stronghold.report(model).skipped_steps == (nonfinite == "skip")
            optimizer.zero_grad()
            torch.manual_seed(2)
            ordinary_loop(model, optimizer, numbers(2))
        if not first:
            torch.manual_seed(1)
            ordinary_loop(plain, expected, numbers(2))
        torch.manual_seed(2)
        ordinary_loop(plain, expected, numbers(2))
        assert_same_models(model, plain)
        assert_same_states(optimizer, expected)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_gradients_that_are_not_finite_in_the_backward_pass(layer, nonfinite):
    """Layers updated before the first such gradient stay updated; it and all others are left alone, the root too."""
    model, optimizer = offloaded("in_backward", nonfinite=nonfinite)
    ordinary_loop(model, optimizer, numbers(2))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    updates = model.layers[0].up.weight._unit.owner.device.updates
    handle = model.layers[layer].up.weight.register_hook(lambda gradient: gradient * float("nan"))
    loss = model(numbers(1)[0])
    updates.run(lambda: time.sleep(0.2))  # the updates lag behind the step that asks for them
    loss.backward()
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match="nothing was updated from the first such layer on"):
            optimizer.step()
    else:
        optimizer.step()
    for name, value in model.state_dict().items():
        updated = name.startswith("layers.") and int(name.split(".")[1]) > layer
        assert torch.equal(value, before[name]) is not updated, name
    assert stronghold.report(model).skipped_steps == (nonfinite == "skip")
    handle.remove()
    optimizer.zero_grad()
    steps = [state["step"].item() for state in optimizer.state.values()]
    ordinary_loop(model, optimizer, numbers(1))
    assert [state["step"].item() for state in optimizer.state.values()] == [step + 1 for step in steps]


@pytest.mark.parametrize("dropped_by", ["optimizer", "model"])
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_loop_may_leave_out_the_step_of_gradients_that_are_not_finite(layer, dropped_by):
    """It goes on as with a step that is skipped."""
    (model, optimizer), (other, skips) = offloaded("in_backward"), offloaded("in_backward", nonfinite="skip")
    for one, its in ((model, optimizer), (other, skips)):
        torch.manual_seed(3)
        ordinary_loop(one, its, numbers(2))
        handle = one.layers[layer].up.weight.register_hook(lambda gradient: gradient * float("nan"))
        torch.manual_seed(4)
        one(numbers(1)[0]).backward()
        handle.remove()
        if its is skips:
            its.step()
        (one if one is model and dropped_by == "model" else its).zero_grad()
        torch.manual_seed(5)
        ordinary_loop(one, its, numbers(2))
    assert_same_models(model, other)
    assert_same_states(optimizer, skips)
    assert not torch.isnan(model.layers[0].up.weight).any()


def test_gradients_of_others_do_not_keep_such_a_loop_from_going_on():
    """Parameters that are in no group have theirs until the user drops them."""
    _, model = pair(Residual)
    others = set(model.layers[1].parameters())
    optimizer = stronghold.AdamW([p for p in model.parameters() if p not in others], update="in_backward")
    handle = model.layers[3].up.weight.register_hook(lambda gradient: gradient * float("nan"))
    model(numbers(1)[0]).backward()
    handle.remove()
    optimizer.zero_grad()
    assert model.layers[1].up.weight.grad is not None
    for parameter in others:
        parameter.grad.nan_to_num_()  # behind the layer whose gradients were not
    before = model.layers[0].up.weight.clone()
    ordinary_loop(model, optimizer, numbers(1))
    assert not torch.equal(model.layers[0].up.weight, before)


def test_in_backward_refuses_a_second_backward():
    model, optimizer = offloaded("in_backward")
    ordinary_loop(model, optimizer, numbers(2))
    batch = numbers(1)[0]
    model(batch).backward()
    optimizer.wait()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(OffloadedModelError, match="second backward"):
        model(batch).backward()
    assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    assert_close(optimizer.state_dict(), states, rtol=0, atol=0)
    optimizer.step()  # with what the first has left
    optimizer.zero_grad()
    ordinary_loop(model, optimizer, numbers(2))


def test_in_backward_refuses_clipping():
    model, optimizer = offloaded("in_backward")
    model(numbers(1)[0]).backward()
    optimizer.wait()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for clip in (
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=False),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: model.layers[0].up.weight.grad.norm(1),
        lambda: model.layers[0].up.weight.grad + 1,
    ):
        with pytest.raises(OffloadedModelError, match="use update='deferred'"):
            clip()
    assert_close(dict(model.state_dict()), weights, rtol=0, atol=0)
    assert model.layers[0].up.weight.grad.shape == model.layers[0].up.weight.shape


def test_in_backward_has_no_gradients_to_fill_with_zeros():
    """It dropped them, so that a layer that did not run in the next step was not decayed, as torch.optim's is."""
    model, optimizer = offloaded("in_backward")
    model(numbers(1)[0]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"set_to_none=False\); call zero_grad\(\)"):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(OffloadedModelError, match="no gradient can be read"):
        model.layers[0].up.weight.grad.sum()


def test_in_backward_zero_grad():
    plain, _ = pair(Residual)
    model, optimizer = offloaded("in_backward")
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for one, each in ((plain, expected), (model, optimizer)):
        torch.manual_seed(5)
        for batch in numbers(3):
            one(batch).backward()
            each.step()
            each.zero_grad()
    assert_close(dict(model.state_dict()), dict(plain.state_dict()))


def test_in_backward_needs_to_be_the_only_optimizer():
    model, optimizer = offloaded()
    with pytest.raises(OffloadedModelError, match="only optimizer"):
        stronghold.AdamW(model.parameters(), update="in_backward")
    model(numbers(1)[0]).backward()
    optimizer.step()  # the first goes on as it was
    assert optimizer.state_dict()["state"]


def test_two_optimizers_may_share_a_model_when_updates_are_deferred():
    class Two:
        def __init__(self, kind, model):
            self.parts = [
                kind([p for p in model.parameters() if p.ndim > 1], **ADAMW),
                kind([p for p in model.parameters() if p.ndim <= 1], **{**ADAMW, "lr": 0.03}),
            ]

        def step(self):
            for part in self.parts:
                part.step()

        def zero_grad(self):
            for part in self.parts:
                part.zero_grad()

    plain, model = pair(Residual)
    results = []
    for one, kind in ((plain, torch.optim.AdamW), (model, stronghold.AdamW)):
        torch.manual_seed(3)
        results.append(ordinary_loop(one, Two(kind, one), numbers(4)))
    assert_close(results[1], results[0])
    assert_same_models(model, plain)


def test_sparse_gradients_are_refused():
    class Sparse(Residual):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 16, sparse=True)

        def forward(self, x):
            return super().forward(x + self.words(torch.tensor([0, 1, 2, 3, 4, 4])))

    _, model = pair(Sparse)
    optimizer = stronghold.AdamW(model.parameters())
    model(numbers(1)[0]).backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OffloadedModelError, match="sparse=False"):
        optimizer.step()
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert not optimizer.state_dict()["state"]

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(5, 16, sparse=True)

        def forward(self, x):
            return x + self.words(torch.tensor([0, 1, 2, 3, 4, 4]))

    _, model = pair(lambda: Residual(block=Layer))
    optimizer = stronghold.AdamW(model.parameters())
    with pytest.raises(OffloadedModelError, match="sparse=False"):
        model(numbers(1)[0]).backward()
    assert not optimizer.state_dict()["state"]


def test_a_parameter_without_a_gradient_has_no_state():
    follow(Frozen, numbers(2))
    _, optimizer = follow(lambda: Residual(block=Experts), [batch[:1, :1] for batch in numbers(2)])
    parameters = sum(len(group["params"]) for group in optimizer.param_groups)
    assert 0 < len(optimizer.state_dict()["state"]) < parameters


def test_a_look_at_a_state_that_is_not_there_adds_none():
    """The look itself leaves an entry without any, as torch.optim's does."""
    model = pair(Residual)[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    assert not optimizer.state[model.layers[0].up.weight]
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    optimizer.load_state_dict(saved)


def test_an_entry_of_the_state_is_used_as_a_dictionary_is():
    model = pair(Residual)[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    model(numbers(1)[0]).backward()
    optimizer.step()
    entry, weight = optimizer.state[model.layers[0].up.weight], model.layers[0].up.weight
    known = {name: entry[name] for name in ("step", "exp_avg", "exp_avg_sq")}
    assert {**entry} == dict(entry.items()) == entry.copy() == known and len(entry) == 3
    entry.copy().clear()
    assert entry.get("exp_avg") is known["exp_avg"] and "mine" not in entry
    entry.update(mine=1)
    assert (entry.setdefault("mine", 2), entry.pop("mine"), entry.pop("mine", None)) == (1, 1, None)
    assert optimizer.state[weight] is entry and list(entry) == list(known)


def test_reset_states_begin_at_zero():
    """By clearing them, which users do, and by loading a dictionary without any."""

    def loop(model, optimizer, batches):
        losses = ordinary_loop(model, optimizer, batches[:2])
        optimizer.state.clear()
        losses += ordinary_loop(model, optimizer, batches[2:4])
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
        return losses + ordinary_loop(model, optimizer, batches[4:])

    follow(Residual, numbers(6), loop)


def test_state_dictionaries_are_written_to_files():
    model, optimizer = offloaded()
    ordinary_loop(model, optimizer, numbers(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_close(loaded["optimizer"], optimizer.state_dict(), rtol=0, atol=0)
    assert_close(dict(loaded["model"]), dict(model.state_dict()), rtol=0, atol=0)
    assert_close(copy.deepcopy(optimizer.state_dict()), optimizer.state_dict(), rtol=0, atol=0)
    kept = sum(4 * p.numel() for p in model.parameters())
    assert file.getbuffer().nbytes < 3 * kept * 1.5 + 60_000, "a file holds each tensor's bytes, not its buffer's"


@BOTH
def test_a_step_prepares_each_parameters_change_once(update, monkeypatch):
    """What is not prepared anew in the update's turn costs the launching thread nothing twice."""
    prepared = Counter()
    operands = AdamWChange.operands
    monkeypatch.setattr(
        AdamWChange, "operands", lambda c, unit: prepared.update([(unit, c.index)]) or operands(c, unit)
    )
    model, optimizer = offloaded(update)
    for _ in range(2):
        prepared.clear()
        model(numbers(1)[0]).backward()
        optimizer.step()
        optimizer.wait()
        assert len(prepared) == len(list(model.parameters()))
        assert set(prepared.values()) == {1}
        optimizer.zero_grad()

"""Where a backward pass has updated layers and no step follows, the model is not PyTorch's: that is refused."""

import contextlib
import copy

import pytest
import torch

import stronghold
from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.small import ADAMW, Residual, assert_same_models, assert_same_states, numbers, ordinary_loop, pair

LAYERS = 4
SETTINGS = [{"window": 1}, {"window": 2, "activations": "keep"}, {"resident": 2}, {"resident": LAYERS}]
PLACES = pytest.mark.parametrize("settings", SETTINGS, ids=str)
PART = r"dropped or replaced before step\(\) \(got layers\.{0}.*updated in part.*load the last checkpoint"


def both(**settings):
    """Returns a plain model and an offloaded one, each with its optimizer, after two steps."""
    plain, model = pair(lambda: Residual(LAYERS), **settings)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    optimizer = stronghold.AdamW(model.parameters(), update="in_backward", **ADAMW)
    train((plain, expected), (model, optimizer), seed=1)
    return (plain, expected), (model, optimizer)


def train(*runs, seed):
    for model, optimizer in runs:
        torch.manual_seed(seed)
        ordinary_loop(model, optimizer, numbers(2))


@contextlib.contextmanager
def failing(model, layer, name="norm.bias"):
    """Has the backward pass of one layer fail amid it."""
    handle = model.layers[layer].get_parameter(name).register_hook(lambda gradient: 1 / 0)
    yield
    handle.remove()


def fail(model, layer, name="norm.bias"):
    with failing(model, layer, name), pytest.raises(ZeroDivisionError):
        torch.manual_seed(2)
        model(numbers(1)[0]).backward()


def same(one, other):
    (model, optimizer), (plain, expected) = one, other
    assert_same_models(model, plain)
    assert_same_states(optimizer, expected)


@pytest.mark.parametrize(("settings", "layer"), crossed(SETTINGS, range(LAYERS - 1), together=1), ids=str)
def test_another_try_after_a_pass_that_failed_is_refused_until_a_state_is_loaded(settings, layer):
    """The layers behind the failure were updated twice: once by each pass."""
    ours, plain = both(**settings)[::-1]
    saved = copy.deepcopy((ours[0].state_dict(), ours[1].state_dict()))
    fail(ours[0], layer)
    ours[1].zero_grad()
    for again in (lambda: ours[0](numbers(1)[0]), lambda: ours[0].eval()(numbers(1)[0]), ours[1].step):
        for _ in range(2):
            with pytest.raises(OffloadedModelError, match=PART.format(layer + 1)):
                again()
    ours[0].train().load_state_dict(saved[0])
    ours[1].load_state_dict(saved[1])
    train(plain, ours, seed=3)
    same(ours, plain)


@PLACES
def test_the_same_graph_is_not_gone_through_twice(settings):
    ours = both(**settings)[1]
    loss = ours[0](numbers(1)[0])
    with failing(ours[0], 1), pytest.raises(ZeroDivisionError):
        loss.backward(retain_graph=True)
    ours[1].zero_grad()
    before = {name: value.clone() for name, value in ours[0].state_dict().items()}
    with pytest.raises(OffloadedModelError, match=PART.format(2)):
        loss.backward()
    for name, value in ours[0].state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(
    ("settings", "name"),
    crossed(SETTINGS, ["norm.bias", "up.weight", "down.weight", "down.bias"], together=1),
    ids=str,
)
def test_a_pass_that_failed_before_it_updated_anything_may_be_tried_again(settings, name):
    """What had come of the last layer's gradients updated it when they were dropped."""
    plain, ours = both(**settings)
    for model, optimizer in (plain, ours):
        fail(model, LAYERS - 1, name)
        optimizer.zero_grad()
    train(plain, ours, seed=3)
    same(ours, plain)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_step_with_what_a_failed_pass_has_left_is_refused(layer):
    """PyTorch would take it with the gradients that were there."""
    ours = both(window=2)[1]
    fail(ours[0], layer)
    before = {name: value.clone() for name, value in ours[0].state_dict().items()}
    with pytest.raises(OffloadedModelError, match=rf"of a pass that failed \(got layers\.{layer}\); call zero_grad"):
        ours[1].step()
    for name, value in ours[0].state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("dropped", ["all", "one", "replaced"])
def test_a_step_without_the_gradients_that_it_ends_is_refused(dropped):
    """PyTorch would update none of these, or by what was put there: layers were updated, and the root was not."""
    ours = both(window=2)[1]
    torch.manual_seed(2)
    ours[0](numbers(1)[0]).backward()
    weight = ours[0].layers[2].up.weight
    if dropped == "all":
        ours[1].zero_grad()
    else:
        weight.grad = None if dropped == "one" else torch.ones(weight.shape)
    with pytest.raises(OffloadedModelError, match=PART.format(0 if dropped == "all" else 2)):
        ours[1].step()


CHANGES = {"lr": 0.5, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.5}


@pytest.mark.parametrize("name", CHANGES)
def test_settings_that_change_between_the_pass_and_the_step_are_refused(name):
    """PyTorch updates all with those of the step: here layers have been updated with those of the pass."""
    (model, optimizer) = both(window=2)[1]
    model(numbers(1)[0]).backward()
    group = optimizer.param_groups[0]
    before, group[name] = group[name], CHANGES[name]
    with pytest.raises(OffloadedModelError, match=rf"in_backward.*\(got {name} .* in group 0\); set them before back"):
        optimizer.step()
    group[name] = before
    optimizer.step()


@pytest.mark.parametrize("value", [torch.tensor(1e-2), [0.8, 0.9]])
def test_settings_that_are_changed_in_place_in_between_are_refused(value):
    (model, optimizer) = both(window=2)[1]
    name = "betas" if isinstance(value, list) else "lr"
    optimizer.param_groups[0][name] = value
    model(numbers(1)[0]).backward()
    if isinstance(value, list):
        value[0] = 0.7
    else:
        value.mul_(2)
    with pytest.raises(OffloadedModelError, match=rf"in_backward.*\(got {name} "):
        optimizer.step()


@pytest.mark.parametrize("lr", [1e-2, torch.tensor(1e-2)])
def test_settings_that_change_before_the_pass_are_those_of_both(lr):
    """What a scheduler keeps in a group is no setting."""
    runs = both(window=2)
    for step in range(3):
        for model, optimizer in runs:
            optimizer.param_groups[0]["lr"] = lr * (step + 1)
            torch.manual_seed(step)
            model(numbers(2)[step % 2]).backward()
            optimizer.param_groups[0]["initial_lr"] = step
            optimizer.step()
            optimizer.zero_grad()
    same(runs[1], runs[0])


def test_a_second_step_with_the_same_gradients_is_refused():
    """PyTorch takes it with them: here only the root's were there for it."""
    ours = both(window=2)[1]
    ours[0](numbers(1)[0]).backward()
    ours[1].step()
    with pytest.raises(OffloadedModelError, match=r"not there for a second one.*\(got layers\.0, .*call zero_grad"):
        ours[1].step()
    ours[1].zero_grad()
    ours[1].step()  # without gradients there is nothing to be done


def test_passes_over_layers_of_their_own_are_one_step():
    """Several backward passes before a step are PyTorch's where none of them adds to another's gradients."""
    plain, ours = both(window=2)
    for model, optimizer in (plain, ours):
        first, second = numbers(2)
        torch.manual_seed(2)
        x = model.into(first)
        for layer in model.layers[:2]:
            x = layer(x)
        x.sum().backward()
        x = second
        for layer in model.layers[2:]:
            x = layer(x)
        model.out(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    same(ours, plain)


def test_gradients_of_inputs_alone_update_nothing():
    plain, ours = both(window=2)
    for model, _ in (plain, ours):
        batch = numbers(1)[0].requires_grad_()
        torch.autograd.grad(model(batch), batch)
    train(plain, ours, seed=3)
    same(ours, plain)


def test_a_callback_of_the_users_may_look_at_gradients_as_the_pass_ends():
    """Autograd calls it outside the pass, and before the engine hears of the end."""
    plain, ours = both(window=2)
    for model, optimizer in (plain, ours):

        class Callback(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient, model=model):
                torch.autograd.Variable._execution_engine.queue_callback(lambda: model.layers[0].up.weight.grad)
                return gradient

        torch.manual_seed(2)
        Callback.apply(model(numbers(1)[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    same(ours, plain)


def test_a_checkpoint_that_is_loaded_ends_it(tmp_path):
    plain, ours = both(window=2)
    stronghold.checkpoint.save(tmp_path / "saved", ours[0], ours[1])
    fail(ours[0], 1)
    ours[1].zero_grad()
    stronghold.checkpoint.load(tmp_path / "saved", ours[0], ours[1])
    train(plain, ours, seed=3)
    same(ours, plain)


@pytest.mark.parametrize("settings", [{"window": 2}, {"window": 2, "store": "disk"}], ids=str)
def test_a_save_between_the_backward_pass_and_its_step_is_refused(settings, tmp_path):
    """Half of a step would be in it, and the run that goes on from it would take the same batch again."""
    if "store" in settings:
        settings = {**settings, "store": tmp_path / "store"}
    plain, ours = both(**settings)
    place = tmp_path / ("store" if "store" in settings else "saved")
    for model, _ in (plain, ours):
        torch.manual_seed(2)
        model(numbers(1)[0]).backward()
    with pytest.raises(OffloadedModelError, match=r"whole step.*\(got layers\.0, .*save behind step"):
        stronghold.checkpoint.save(place, *ours)
    assert not (tmp_path / "saved").exists()
    for _, optimizer in (plain, ours):
        optimizer.step()
        optimizer.zero_grad()
    stronghold.checkpoint.save(place, *ours)
    train(plain, ours, seed=3)
    same(ours, plain)


def test_what_an_earlier_optimizer_has_used_up_is_no_concern_of_the_next_one():
    """Layers are frozen after a first phase, and a new optimizer has the others alone."""
    plain, ours = both(window=2)
    for model, optimizer in (plain, ours):
        torch.manual_seed(2)
        model(numbers(1)[0]).backward()
        optimizer.step()
        for layer in model.layers[:2]:
            layer.requires_grad_(False)
        model.into.requires_grad_(False)
    models = plain[0], ours[0]
    del optimizer, plain, ours
    trained = [[p for p in model.parameters() if p.requires_grad] for model in models]
    plain = models[0], torch.optim.AdamW(trained[0], **ADAMW)
    ours = models[1], stronghold.AdamW(trained[1], update="in_backward", **ADAMW)
    for _, optimizer in (plain, ours):
        optimizer.zero_grad()
    train(plain, ours, seed=3)
    for model, _ in (plain, ours):
        model.zero_grad()  # what is used up cannot be compared
    same(ours, plain)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_weights_that_are_loaded_go_on_with_a_new_optimizer(update):
    plain, ours = both(window=2)
    model, optimizer = ours
    saved = copy.deepcopy(model.state_dict())
    fail(model, 1)
    optimizer.zero_grad()
    model.load_state_dict(saved)
    del optimizer, ours
    ours = model, stronghold.AdamW(model.parameters(), update=update, **ADAMW)
    plain = plain[0], torch.optim.AdamW(plain[0].parameters(), **ADAMW)
    train(plain, ours, seed=3)
    same(ours, plain)

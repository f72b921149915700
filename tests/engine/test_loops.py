"""Training loops that users write, on layers that pass through the window: each does what it does in plain PyTorch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import stronghold
from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.small import (
    ADAMW,
    KINDS,
    SIZE,
    Block,
    Decoder,
    EncoderDecoder,
    Experts,
    Frozen,
    Normed,
    Residual,
    assert_close,
    assert_same_models,
    follow,
    numbers,
    pair,
    words,
)

ACTIVATIONS = ("recompute", "keep", "host")
every_way = pytest.mark.parametrize("activations", ACTIVATIONS)


def accumulated(model, optimizer, batches):
    """A second backward() before each step."""
    losses = []
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        for batch in (one, other):
            loss = model(batch)
            (loss / 2).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def never_zeroed(model, optimizer, batches):
    """Gradients grow from step to step."""
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def zeroed_in_place(model, optimizer, batches):
    losses = []
    for batch in batches:
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def zeroed_by_the_model(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        losses.append(loss.detach())
    return losses


def evaluated_between(model, optimizer, batches):
    """Passes in evaluation mode, without and with gradients, before and between steps; and in training mode."""
    seen = []
    for batch in batches:
        model.eval()
        with torch.no_grad():
            seen.append(model(batch))
        with torch.inference_mode():
            seen.append(model(batch).clone())
        seen.append(model(batch).detach())  # its graph is dropped
        model.train()
        with torch.no_grad():
            seen.append(model(batch))
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def trained_in_evaluation_mode(model, optimizer, batches):
    model.eval()
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def forward_twice_backward_once(model, optimizer, batches):
    losses = []
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        loss = model(one) + 2 * model(other)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def forward_twice_backward_twice(model, optimizer, batches):
    """Both forward passes before both backward passes, the first one's first."""
    losses = []
    for one, other in zip(batches[::2], batches[1::2], strict=True):
        pair = [model(one), model(other)]
        for loss in pair:
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def evaluated_before_backward(model, optimizer, batches):
    """A callback sets the model to evaluation, and something that the layers read, between the two passes."""
    losses = []
    for batch in batches:
        model.train()
        loss = model(batch)
        model.eval()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def retained(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward(retain_graph=True)
        (3 * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def dropped(model, optimizer, batches):
    """Every other forward pass has no backward pass; one graph lives on until long after."""
    losses, kept = [], []
    for batch in batches:
        model(batch)
        kept.append(model(batch))
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [loss.detach() for loss in kept]


def clipped(model, optimizer, batches):
    seen = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        seen += [loss.detach(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def clipped_by_value(model, optimizer, batches):
    losses = []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def thawing(model, optimizer, batches):
    """Layers and parameters are frozen and unfrozen between steps."""
    losses = []
    for step, batch in enumerate(batches):
        model.layers[step % len(model.layers)].requires_grad_(False)
        model.layers[(step + 2) % len(model.layers)].requires_grad_(True)
        model.layers[-1].up.bias.requires_grad_(step % 2 == 0)
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def frozen_before_backward(model, optimizer, batches):
    """Layers and parameters are frozen and unfrozen between the two passes, of which the second has a graph."""
    seen = []
    for step, batch in enumerate(batches):
        kept, loss = model(batch), model(batch.flip(0))
        model.layers[step % len(model.layers)].requires_grad_(step % 2 == 1)
        model.layers[-1].up.bias.requires_grad_(step % 2 == 0)
        loss.backward()
        seen += [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        model.layers[(step + 1) % len(model.layers)].requires_grad_(step % 2 == 0)
        kept.backward()
        seen += [p.requires_grad for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def gradients_by_hand(model, optimizer, batches):
    """The user reads, keeps, replaces and sets gradients, and steps twice with one."""
    seen = []
    for batch in batches:
        kept = []
        for part in (batch, batch.flip(0) * 2):
            model(part).backward()
            kept.append([p.grad for p in model.parameters()])
            optimizer.zero_grad()
        seen.append([g.clone() for gradients in kept for g in gradients])
        for parameter, one, other in zip(model.parameters(), *kept, strict=True):
            parameter.grad = one + other.sign() * 0.01
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad.mul_(0.5)
        optimizer.step()
        for parameter, one in zip(model.parameters(), kept[0], strict=True):
            parameter.grad = one.clone()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def weights_by_hand(model, optimizer, batches):
    """The user reads and writes weights between steps, in every way that there is."""
    seen = []
    for step, batch in enumerate(batches):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach(), model.layers[0].up.weight.sum().detach(), model.out.weight.detach().clone()]
        layer = model.layers[step % len(model.layers)]
        with torch.no_grad():
            layer.up.weight.mul_(0.9)
            model.into.weight.add_(0.01)
        layer.down.weight.data.clamp_(-0.2, 0.2)
        layer.up.bias.data = layer.up.bias.data + 0.1
        model.out.bias.data = torch.full_like(model.out.bias.data, 0.3)
        nn.init.constant_(layer.norm.bias, 0.02)
        layer.norm.weight.detach().numpy()[:] += 0.05
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        torch.nn.utils.vector_to_parameters(vector * 0.99, model.parameters())
        model.load_state_dict({name: value * 0.99 for name, value in model.state_dict().items()})
    return seen


def aliased(model, optimizer, batches):
    """The user holds on to the memory of weights and of gradients, and reads and writes it right behind the step."""
    weights = [model.layers[1].up.weight.data, model.out.weight.detach(), model.layers[2].down.bias.data.view(-1, 2)]
    state, seen = model.state_dict(), []
    for batch in batches:
        loss = model(batch)
        loss.backward()
        gradients = [p.grad.view(-1) for p in model.parameters()]
        optimizer.step()
        seen += [loss.detach(), *(value.clone() for value in state.values())]
        for gradient in gradients:
            gradient.zero_()
        for weight in weights:
            weight.mul_(0.9)
        optimizer.zero_grad()
    return seen


def exploding(model, optimizer, batches):
    """A hook of the user's ends a backward pass with an error; the loop goes on."""
    losses = []
    for step, batch in enumerate(batches):
        model(batch).backward()

        def fail(gradient):
            raise ZeroDivisionError("the user's")

        handle = model.layers[step % len(model.layers)].up.weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            model(batch).backward()
        handle.remove()
        model.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


LOOPS = [
    accumulated,
    never_zeroed,
    zeroed_in_place,
    zeroed_by_the_model,
    evaluated_between,
    trained_in_evaluation_mode,
    forward_twice_backward_once,
    forward_twice_backward_twice,
    evaluated_before_backward,
    frozen_before_backward,
    retained,
    dropped,
    clipped,
    clipped_by_value,
    thawing,
    gradients_by_hand,
    weights_by_hand,
    aliased,
    exploding,
]


@pytest.mark.parametrize(("loop", "window", "activations"), crossed(LOOPS, (1, 3), ACTIVATIONS, together=1))
def test_every_loop_does_what_it_does_in_plain_pytorch(loop, window, activations):
    follow(Residual, numbers(4), loop, window=window, activations=activations)


@pytest.mark.parametrize(
    ("kind", "loop", "activations"),
    crossed(
        ("normed", "stateful", "encoder_decoder", "experts", "looped", "torch_encoder"),
        (evaluated_between, forward_twice_backward_twice, evaluated_before_backward, retained, accumulated),
        ACTIVATIONS,
        together=1,
    ),
)
def test_loops_over_layers_with_a_state_or_several_inputs(kind, loop, activations):
    follow(KINDS[kind].build, KINDS[kind].batches(4), loop, window=2, activations=activations)


@every_way
@pytest.mark.parametrize("kind", ["residual", "decoder", "looped"])
def test_autocast(kind, activations):
    """Weights are used twice under one autocast; each use may round on its own, so that only losses stay close."""

    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().float())
        return losses

    plain, ours = pair(KINDS[kind].build, activations=activations)
    batches = KINDS[kind].batches(4)
    torch.manual_seed(7)
    expected = loop(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), batches)
    torch.manual_seed(7)
    got = loop(ours, stronghold.AdamW(ours.parameters(), **ADAMW), batches)
    assert_close(got, expected, rtol=1e-2, atol=1e-3)
    assert_same_models(ours, plain, rtol=0.1, atol=4e-2)


@every_way
def test_a_checkpoint_of_the_users_own_around_layers(activations):
    class Checkpointed(Residual):
        reentrant = False

        def features(self, x):
            x = self.into(x)

            def run(x, layers):
                for layer in layers:
                    x = layer(x)
                return x

            x = checkpoint(run, x, self.layers[:2], use_reentrant=self.reentrant)
            return self.out(checkpoint(run, x, self.layers[2:], use_reentrant=self.reentrant))

    class Reentrant(Checkpointed):
        reentrant = True

    for build in (Checkpointed, Reentrant):
        for window in (1, 2, 4):
            follow(build, numbers(4), accumulated, window=window, activations=activations)


@every_way
def test_forward_hooks_inside_a_layer_see_each_run_once(activations):
    def loop(model, optimizer, batches):
        seen = []

        def change(output):
            output.mul_(1.1)

        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
            layer.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().clone()))
            layer.down.register_forward_hook(lambda module, args, output: output * 1.5)
            layer.down.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
            layer.norm.register_forward_hook(lambda module, args, output: change(output))
            layer.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
            layer.up.register_full_backward_hook(lambda module, into, out: seen.append(out[0].clone()))
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    follow(lambda: Residual(block=lambda: Block(dropout=0.0)), numbers(3), loop, activations=activations)


@every_way
def test_a_hook_that_comes_during_a_layers_run_stays(activations):
    def loop(model, optimizer, batches):
        losses, came = [], []

        def register(layer):
            def hook(module, args, output):
                if len(came) < 3 * len(model.layers) and layer not in came[-1:]:
                    came.append(layer)
                    layer.down.register_forward_hook(lambda module, args, output: output * 1.1)
                    layer.up.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

            return hook

        for layer in model.layers:
            layer.down.register_forward_pre_hook(lambda module, args: None)
            layer.up.register_forward_hook(register(layer))
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [len(layer.down._forward_hooks) for layer in model.layers]

    follow(lambda: Residual(block=lambda: Block(dropout=0.0)), numbers(5), loop, activations=activations)


@every_way
def test_old_normalisation_by_hooks_runs_again(activations):
    """They set the weight from a hook that returns nothing: it is part of the computation all the same."""

    class Old(Block):
        def __init__(self):
            super().__init__()
            torch.nn.utils.weight_norm(self.up)
            torch.nn.utils.spectral_norm(self.down)

    with pytest.warns(FutureWarning):
        follow(lambda: Residual(block=Old), numbers(3), activations=activations)


@every_way
def test_recorded_outputs_may_be_part_of_the_loss(activations):
    """As router logits are in mixture-of-experts models."""

    class Recording(Residual):
        def forward(self, x):
            recorded = []
            handles = [
                layer.up.register_forward_hook(lambda module, args, output: recorded.append(output))
                for layer in self.layers
            ]
            loss = super().forward(x)
            for handle in handles:
                handle.remove()
            assert len(recorded) == len(self.layers)
            return loss + sum(out.abs().mean() for out in recorded)

    follow(Recording, numbers(3), activations=activations)


@every_way
def test_hooks_on_parameters(activations):
    """Tensor hooks may change gradients; hooks behind the accumulation may look, whenever they were added."""

    def loop(model, optimizer, batches):
        seen = []

        def look(parameter):
            seen.append(parameter.grad.clone())

        model.layers[0].up.weight.register_post_accumulate_grad_hook(look)
        for step, batch in enumerate(batches):
            if step == 1:
                model.layers[1].up.weight.register_hook(lambda gradient: gradient * 2)
                model.layers[2].down.weight.register_post_accumulate_grad_hook(look)
                model.out.weight.register_post_accumulate_grad_hook(look)
            loss = model(batch)
            if step == 2:
                model.layers[1].down.weight.register_post_accumulate_grad_hook(look)
                model.layers[3].up.bias.register_hook(lambda gradient: gradient * 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen

    follow(Residual, numbers(4), loop, activations=activations)


@every_way
def test_gradients_of_inputs_and_parameters_without_backward(activations):
    def loop(model, optimizer, batches):
        seen = []
        for batch in batches:
            x = batch.clone().requires_grad_()
            seen.append(torch.autograd.grad(model(x), x)[0])
            parameters = list(model.parameters())
            seen += [g.clone() for g in torch.autograd.grad(model(batch), parameters)]
            assert all(p.grad is None for p in parameters)
            (model(x)).backward(inputs=[x, model.layers[1].up.weight])
            seen += [x.grad.clone(), model.layers[1].up.weight.grad.clone()]
            optimizer.step()
            optimizer.zero_grad()
        return seen

    follow(Residual, numbers(3), loop, activations=activations)


@every_way
def test_frozen_layers_move_no_gradient(activations):
    model, _ = follow(Frozen, numbers(3), activations=activations, window=1)
    step = stronghold.report(model).step
    trained = [p for i in (1, 3, 4) for p in model.layers[i].parameters() if p.requires_grad]
    padding = 64 * len(trained)
    length = sum(4 * p.numel() for p in trained)
    assert length <= step.gradient_bytes <= length + padding
    # Forward fetches 5; the backward pass finds the last, and the frozen layers before the first trained one rest.
    assert step.fetches == 5 + 3


def test_a_wholly_frozen_row_moves_nothing_down():
    def build():
        model = Residual()
        model.layers.requires_grad_(False)
        model.into.requires_grad_(False)
        return model

    model, _ = follow(build, numbers(3), window=2)
    report = stronghold.report(model)
    assert report.step.gradient_bytes == 0
    assert report.gradients_device_bytes == 0


def test_layers_frozen_when_offloaded_train_once_unfrozen():
    def build():
        model = Residual()
        model.layers.requires_grad_(False)
        return model

    def loop(model, optimizer, batches):
        losses = []
        for step, batch in enumerate(batches):
            model.layers.requires_grad_(step >= 2)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    follow(build, numbers(5), loop)


@every_way
def test_experts_without_tokens_are_skipped(activations):
    """torch.optim leaves parameters without a gradient alone: no decay, no count of steps."""
    model, optimizer = follow(lambda: Residual(block=Experts), [b[:1, :2] for b in numbers(4)], activations=activations)
    steps = {name: optimizer.state[p]["step"].item() for name, p in model.named_parameters() if optimizer.state[p]}
    assert len(set(steps.values())) > 1, "some experts must have been skipped in some steps for this test to tell"
    follow(
        lambda: Residual(block=Experts),
        [b[:1, :2] for b in numbers(4)],
        zeroed_in_place,
        activations=activations,
    )


@every_way
def test_micro_batches_of_the_whole_batch_are_the_batch(activations):
    for kind in ("residual", "decoder", "encoder_decoder", "structured"):
        follow(KINDS[kind].build, KINDS[kind].batches(3), micro_batch=4, activations=activations)


@pytest.mark.parametrize(("size", "window", "activations"), crossed([1, 3], [1, 2], ACTIVATIONS, together=1))
def test_micro_batches_train_as_the_whole_batch_does(size, window, activations):
    """Without dropout, whose numbers are drawn piece by piece."""
    for build, batches in (
        (lambda: Residual(block=lambda: Block(dropout=0.0)), numbers(3)),
        (Decoder, words(3)),
        (EncoderDecoder, words(3)),
    ):
        model, _ = follow(build, batches, micro_batch=size, window=window, activations=activations)
        layers, step = stronghold.report(model).layers, stronghold.report(model).step
        assert step.fetches == 2 * layers - window, "weights cross the link once a pass however small the pieces"


@pytest.mark.parametrize(
    ("update", "activations"),
    [
        ("in_backward", "recompute"),
        ("in_backward", "host"),
        pytest.param("in_backward", "keep", marks=pytest.mark.long),
        *(pytest.param("deferred", one, marks=pytest.mark.long) for one in ACTIVATIONS),
    ],
)
def test_updates_in_the_backward_pass_are_the_same(update, activations):
    for kind in ("residual", "decoder", "experts", "frozen", "looped", "shared"):
        follow(
            KINDS[kind].build,
            KINDS[kind].batches(4),
            lambda m, o, b: [x for x in _without_gradients(m, o, b)],
            ours_only={"update": update},
            activations=activations,
        )


def _without_gradients(model, optimizer, batches):
    for batch in batches:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@every_way
def test_second_derivatives_are_refused(activations):
    """They would need weights that the window takes back: with a plain gradient penalty nothing would tell."""
    for frozen in (False, True):
        _, model = pair(Residual, activations=activations, window=1)
        model.requires_grad_(not frozen)
        optimizer = stronghold.AdamW(model.parameters())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        x = numbers(1)[0].requires_grad_()
        with pytest.raises(OffloadedModelError, match="create_graph"):
            torch.autograd.grad(model(x), x, create_graph=True)
        with pytest.raises(OffloadedModelError, match="create_graph"):
            model(x).backward(create_graph=True)
        assert_close(dict(model.state_dict()), before)
        assert not optimizer.state_dict()["state"]
        optimizer.zero_grad()
        model.requires_grad_(True)
        model(x).backward()
        optimizer.step()


def test_a_copy_of_an_offloaded_model_is_an_ordinary_model():
    """torch.optim.swa_utils.AveragedModel copies, and evaluates the copy."""
    model, _ = follow(Residual, numbers(2))
    model.eval()
    batch = numbers(1)[0]
    copied, layer = copy.deepcopy(model), copy.deepcopy(model.layers[1])
    assert_close(dict(copied.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    expected = model(batch)
    assert_close(copied(batch), expected)
    with torch.no_grad():
        for parameter in (*copied.parameters(), *layer.parameters()):
            parameter.zero_()
    assert copied(batch).item() == 0
    assert_close(layer(batch), batch)
    assert_close(model(batch), expected)
    copied.double()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert_close(averaged(batch), expected)


def test_a_model_in_a_file_is_an_ordinary_model(tmp_path):
    model, _ = follow(Residual, numbers(2))
    model.eval()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_close(loaded(numbers(1)[0]), model(numbers(1)[0]))
    assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert loaded.layers[0].up.weight.__class__ is nn.Parameter


def test_statistics_move_once_a_pass():
    """Under recomputation too: BatchNorm counts its batches."""
    model, _ = follow(lambda: Residual(block=Normed), numbers(5))
    assert all(layer.norm.num_batches_tracked == 5 for layer in model.layers)


def test_a_layer_can_be_called_by_itself():
    plain, ours = pair(Residual, window=2)
    x = torch.randn(3, SIZE)
    for number in (2, 0, 3, 2):
        plain.eval()
        ours.eval()
        for model in (plain, ours):
            F.mse_loss(model.layers[number](x), x).backward()
    assert_same_models(ours, plain)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_parameter_is_trained_later_in_a_slot_that_is_long_enough(update):
    """What is kept of a slot for a layer is for the gradients that the layer had then."""
    trained = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), nn.Linear(8, 2))
        late = model[0][1].bias.requires_grad_(False)  # the other layers' gradients are longer: slots stay as they are
        if offloaded:
            model = stronghold.offload(model, device="cpu", window=1, layers="0")
            optimizer = stronghold.AdamW(model.parameters(), lr=0.1, update=update)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(4, 8)
        for step in range(4):
            if step == 2:
                late.requires_grad_(True)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append([parameter.detach().clone() for parameter in model.parameters()])
    for plain, mine in zip(*trained, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_padded_places_of_torch_s_encoder_in_evaluation(nested):
    """By nested tensors plain PyTorch has zeros there, where it takes no gradient; docs/settings.md says so."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(SIZE, 2, SIZE, dropout=0.1, batch_first=True)
    plain = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=nested).eval()
    of = stronghold.offload(copy.deepcopy(plain), device="cpu", window=1)
    x, padded = torch.randn(2, 5, SIZE), torch.arange(5) >= torch.tensor([[3], [4]])
    with torch.no_grad():
        expected, got = (model(x, src_key_padding_mask=padded) for model in (plain, of))
    if not nested:
        assert torch.equal(got, expected)
        return
    assert_close(got[~padded], expected[~padded])
    assert expected[padded].count_nonzero() == 0
    assert_close(got, plain(x, src_key_padding_mask=padded))  # with gradients

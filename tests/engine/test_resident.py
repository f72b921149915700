"""Layers that stay on the device: to everybody but the link they are like any other layer of the model."""

import copy
import math
import time
from typing import ClassVar

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

import stronghold
from stronghold.engine import engine_of
from stronghold.errors import NonFiniteGradientError
from stronghold.layout import ALIGNMENT_BYTES
from stronghold.split import rounded
from stronghold.unit import OffloadedParameter
from tests.crossed import crossed
from tests.delayed import DelayedDevice
from tests.reference import CASES, decay_groups, differences, offloaded, ordinary, snapshot, train
from tests.small import (
    ADAMW,
    Decoder,
    Frozen,
    Looped,
    Residual,
    Shared,
    assert_close,
    assert_same_models,
    assert_same_states,
    assert_unchanged,
    follow,
    numbers,
    ordinary_loop,
    pair,
    words,
)
from tests.small import snapshot as kept

BOTH = pytest.mark.parametrize("update", ["deferred", "in_backward"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SOME = pytest.mark.parametrize("resident", [1, 2, 4])


class Elsewhere(torch.Tensor):
    """A tensor in host memory that says it is on another device: the way of a GPU, without one."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl


def on_another_device(model):
    """Lets the optimizer take a model's resident layers for layers on a GPU, where torch's own operations update."""
    for unit in engine_of(model).layers:
        if unit.resident:
            unit.weight = [torch.Tensor._make_subclass(Elsewhere, weight.data) for weight in unit.weight]
            assert not unit.is_aliased, "or the engine would think that somebody reads along"
    return model


def made(resident, *, elsewhere=False, build=Residual, adamw=ADAMW, dtype=torch.float32, **settings):
    _, model = pair(build, resident=resident, dtype=dtype)
    model = on_another_device(model) if elsewhere else model
    return model, stronghold.AdamW(model.parameters(), **adamw, **settings)


def run(model, optimizer, batches, seed=3):
    torch.manual_seed(seed)
    losses = ordinary_loop(model, optimizer, [b.to(model.out.weight.dtype) for b in batches])
    optimizer.wait()
    return losses


def assert_same_bits(one, other):
    """Compares two models with their optimizers."""
    assert differences(snapshot(*one), snapshot(*other)) == []


# ---- training ----


@BOTH
@SOME
@pytest.mark.parametrize("build", [Residual, Frozen, Looped, Shared])
def test_training_is_plain_pytorchs(build, resident, update):
    follow(build, numbers(4), resident=resident, ours_only={"update": update})


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_layers_of_a_transformer_too(activations):
    follow(Decoder, words(4), resident=2, activations=activations)


@SOME
def test_groups_and_a_scheduler(resident):
    def loop(model, optimizer, batches):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.05], total_steps=8)
        losses = []
        for batch in batches:
            losses += ordinary_loop(model, optimizer, [batch])
            scheduler.step()
        return losses

    def groups(model):
        parameters = list(model.parameters())
        return [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0, "eps": 1e-3, "lr": 3e-2},
        ]

    follow(Residual, numbers(6), loop, groups=groups, resident=resident)


@SOME
def test_only_what_is_in_a_group_is_updated(resident):
    def loop(model, optimizer, batches):
        losses = []
        for batch in batches:
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    model, _ = follow(Residual, numbers(3), loop, groups=lambda m: m.layers[0].up.parameters(), resident=resident)
    assert model.layers[0].down.weight.grad is not None


@pytest.mark.parametrize(("norm", "resident"), crossed([0.02, 1e6], [1, 2, 4], together=1))
def test_accumulation_and_clipping(norm, resident):
    def loop(model, optimizer, batches):
        losses = []
        for number, batch in enumerate(batches, 1):
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
            if number % 3 == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
                optimizer.step()
                optimizer.zero_grad()
        return losses

    def by_itself(model, optimizer, batches):
        if isinstance(optimizer, torch.optim.AdamW):
            return loop(model, optimizer, batches)
        losses = []
        for number, batch in enumerate(batches, 1):
            loss = model(batch)
            loss.backward()
            losses.append(loss.detach())
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    follow(Residual, numbers(9), loop, resident=resident)
    follow(Residual, numbers(9), by_itself, resident=resident, ours_only={"max_grad_norm": norm})


@SOME
def test_freezing_and_unfreezing(resident):
    def loop(model, optimizer, batches):
        losses = []
        for step, batch in enumerate(batches):
            model.layers[0].requires_grad_(step not in (1, 2))
            model.layers[2].up.weight.requires_grad_(step != 3)
            model.layers[3].requires_grad_(step >= 2)
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    follow(Residual, numbers(6), loop, resident=resident)


def frozen_at_first():
    model = Residual()
    model.layers.requires_grad_(False)
    return model


@DTYPES
@SOME
def test_layers_frozen_when_offloaded_train_once_unfrozen(resident, dtype):
    """As the same layers do when they are streamed, bit for bit."""
    found = []
    for number in (resident, 0):
        model, optimizer = made(number, build=frozen_at_first, dtype=dtype)
        run(model, optimizer, numbers(2))
        model.layers.requires_grad_(True)
        run(model, optimizer, numbers(3))
        found.append((model, optimizer))
    assert_same_bits(*found)


@SOME
def test_evaluation_and_passes_without_gradients_in_between(resident):
    def loop(model, optimizer, batches):
        seen = []
        for batch in batches:
            seen += ordinary_loop(model, optimizer, [batch])
            model.eval()
            with torch.no_grad():
                seen.append(model.features(batch))
                x = batch[:, :1]
                for _ in range(4):  # one element after another, as in generation
                    x = torch.cat([x, model.layers[3](model.layers[0](x))[:, -1:]], dim=1)
                seen.append(x)
            with torch.inference_mode():
                seen.append(model(batch).clone())
            model.train()
        return seen

    follow(Residual, numbers(3), loop, resident=resident)


@pytest.mark.parametrize(
    ("states", "update", "dtype"),
    crossed(["fp32", "8bit"], ["deferred", "in_backward"], [torch.float32, torch.bfloat16], together=1),
)
def test_late_copies_change_no_bit(states, update, dtype):
    """Streamed layers on their way, resident ones where they are: in whatever order things get done."""

    def train_on(device):
        torch.manual_seed(0)
        model = stronghold.offload(Residual(layers=5), device=device, window=1, resident=2, dtype=dtype)
        optimizer = stronghold.AdamW(model.parameters(), **ADAMW, states=states, update=update, threads=1)
        torch.manual_seed(3)
        losses = ordinary_loop(model, optimizer, [batch.to(dtype) for batch in numbers(3)])
        optimizer.wait()
        return losses, snapshot(model, optimizer)

    losses, expected = train_on("cpu")
    late = DelayedDevice(1, fetches=2e-3, gradients=2e-3, updates=2e-3, root=2e-3, compute=2e-3)
    got_losses, got = train_on(late)
    late.settle()
    assert got_losses == losses
    assert differences(got, expected) == []


# ---- on a device that is not the host ----


@BOTH
@pytest.mark.parametrize("resident", [1, 4])
def test_on_another_device_training_is_plain_pytorchs_too(update, resident):
    plain, _ = pair(Residual)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    model, optimizer = made(resident, elsewhere=True, update=update)
    losses, expected_losses = run(model, optimizer, numbers(6)), _run_plain(plain, expected, numbers(6))
    assert_close(losses, expected_losses)
    assert_same_models(model, plain)
    assert_same_states(optimizer, expected)


def _run_plain(model, optimizer, batches):
    torch.manual_seed(3)
    return ordinary_loop(model, optimizer, batches)


@DTYPES
@BOTH
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_on_another_device_they_are_what_they_are_on_the_host_to_a_few_roundings(states, update, dtype):
    found = []
    for elsewhere in (False, True):
        model, optimizer = made(2, elsewhere=elsewhere, states=states, update=update, dtype=dtype)
        run(model, optimizer, numbers(1))
        found.append(snapshot(model, optimizer))
    for name, tensors in found[0].items():
        for key, tensor in tensors.items():
            other = found[1][name][key]
            if key == "weight" and dtype is torch.bfloat16:
                torch.testing.assert_close(other, tensor, rtol=2**-7, atol=0.0)
            elif tensor.is_floating_point():
                torch.testing.assert_close(other, tensor, rtol=2e-6, atol=5e-8, msg=f"{name} {key}")
            else:
                assert torch.equal(other, tensor), (name, key)


# ---- gradients that are not finite ----


def spoil(model, layer):
    return model.layers[layer].up.weight.register_hook(lambda gradient: gradient * float("nan"))


def step_fails(optimizer, match):
    if optimizer.nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=match):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped_steps == 1


NONFINITE = pytest.mark.parametrize("nonfinite", ["raise", "skip"])
PLACES = pytest.mark.parametrize("elsewhere", [False, True], ids=["host", "elsewhere"])


@NONFINITE
@PLACES
@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("layer", [0, 1])
def test_gradients_that_are_not_finite_change_nothing(layer, states, elsewhere, nonfinite):
    """Of four layers 0 and 2 are resident."""
    model, optimizer = made(2, elsewhere=elsewhere, states=states, nonfinite=nonfinite)
    run(model, optimizer, numbers(2))
    handle = spoil(model, layer)
    model(numbers(1)[0]).backward()
    before = kept(model, optimizer)
    step_fails(optimizer, r"must be finite .* nothing was updated")
    assert_unchanged(before, model, optimizer)
    handle.remove()
    optimizer.zero_grad()
    run(model, optimizer, numbers(1))
    assert {state["step"].item() for state in optimizer.state.values()} == {3}


@pytest.mark.parametrize(
    ("layer", "kind", "elsewhere", "nonfinite"),
    crossed(
        [0, 1, 2, 3],
        [(torch.float32, "fp32"), (torch.bfloat16, "8bit")],
        [False, True],
        ["raise", "skip"],
    ),
)
def test_in_the_backward_pass_nothing_is_updated_from_the_first_such_layer_on(layer, kind, elsewhere, nonfinite):
    """Of four layers 0 and 2 are resident: each kind comes before the other, and behind it."""
    dtype, states = kind
    model, optimizer = made(
        2, elsewhere=elsewhere, dtype=dtype, states=states, nonfinite=nonfinite, update="in_backward"
    )
    run(model, optimizer, numbers(2))
    before, states_before = snapshot(model, optimizer), copy.deepcopy(optimizer.state_dict()["state"])
    handle = spoil(model, layer)
    loss = model(numbers(1)[0].to(dtype))
    engine_of(model).device.updates.run(lambda: time.sleep(0.05))  # updates lag behind the step that asks for them
    loss.backward()
    step_fails(optimizer, "nothing was updated from the first such layer on")
    now = snapshot(model, optimizer)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        updated = name.startswith("layers.") and int(name.split(".")[1]) > layer
        step = optimizer.state[parameter]["step"].item()
        assert step == states_before[number]["step"].item() + updated == (3 if updated else 2), name
        changed = [key for key, tensor in before[name].items() if not torch.equal(tensor, now[name][key])]
        assert bool(changed) is updated, (name, changed)
        assert all(torch.isfinite(tensor.float()).all() for tensor in now[name].values()), name
    handle.remove()
    optimizer.zero_grad()
    run(model, optimizer, numbers(1))
    for name, parameter in model.named_parameters():
        updated = name.startswith("layers.") and int(name.split(".")[1]) > layer
        assert optimizer.state[parameter]["step"].item() == (4 if updated else 3), name


@PLACES
def test_in_the_backward_pass_the_layers_that_were_updated_are_as_without_the_others(elsewhere):
    """What was updated before the bad layer was updated as ever."""
    clean, spoilt = (made(2, elsewhere=elsewhere, update="in_backward", nonfinite="skip") for _ in range(2))
    spoil(spoilt[0], 1)
    for each in (clean, spoilt):
        run(*each, numbers(1))
    clean, spoilt = snapshot(*clean), snapshot(*spoilt)
    for name, tensors in clean.items():
        if name.startswith(("layers.2", "layers.3")):
            assert all(torch.equal(tensor, spoilt[name][key]) for key, tensor in tensors.items()), name
        else:
            assert not torch.equal(tensors["weight"], spoilt[name]["weight"]), name


@PLACES
def test_a_pass_that_found_inf_is_forgotten_by_the_next(elsewhere):
    model, optimizer = made(2, elsewhere=elsewhere, update="in_backward", nonfinite="skip")
    for expected in (1, 2):
        handle = spoil(model, 2)
        run(model, optimizer, numbers(1))
        handle.remove()
        assert optimizer.skipped_steps == expected
        run(model, optimizer, numbers(2))
        assert optimizer.skipped_steps == stronghold.report(model).skipped_steps == expected
        for name, parameter in model.named_parameters():
            steps = 3 if name.startswith("layers.3") else 2  # layer 3 comes before the bad one
            assert optimizer.state[parameter]["step"].item() == steps * expected, name


@BOTH
def test_the_loss_scale_of_one_bad_sample_is_told_by_its_norm(update):
    model, optimizer = made(2, update=update)
    model(numbers(1)[0] * math.inf).backward()
    with pytest.raises(NonFiniteGradientError, match=r"norm must be finite \(got (nan|inf)\)"):
        optimizer.step()


# ---- what others see of them ----


@DTYPES
@SOME
def test_state_dictionaries_go_both_ways(resident, dtype):
    plain, model = pair(Residual, resident=resident, dtype=dtype)
    own = model.state_dict()
    assert list(own) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(own[name], rounded(value) if dtype is torch.bfloat16 else value), name
        assert own[name].dtype is dtype
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    run(model, optimizer, numbers(2))
    trained = copy.deepcopy(model.state_dict())
    plain.load_state_dict(trained)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(trained)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    plain.eval()
    model.eval()
    if dtype is torch.float32:
        assert torch.equal(model(numbers(1)[0]), plain(numbers(1)[0]))


@DTYPES
def test_a_state_dictionary_loaded_in_mid_training_is_trained_on(dtype):
    """As where the layers are streamed, bit for bit; right behind a step too."""
    found = []
    for resident in (2, 0):
        model, optimizer = made(resident, dtype=dtype)
        start = copy.deepcopy(model.state_dict())
        run(model, optimizer, numbers(2))
        model.load_state_dict(start)
        run(model, optimizer, numbers(2))
        found.append((model, optimizer))
    assert_same_bits(*found)


WRITES = {
    "copy": lambda p: p.copy_(torch.full_like(p, 0.25)),
    "data": lambda p: p.data.mul_(0.5),
    "set data": lambda p: setattr(p, "data", torch.full_like(p, 0.125)),
    "element": lambda p: p.view(-1).__setitem__(0, 3.0),
    "init": nn.init.zeros_,
    "numpy": lambda p: p.detach().view(torch.int16).numpy().fill(0x3E00),
}


@pytest.mark.parametrize(("write", "dtype"), crossed([*WRITES], [torch.float32, torch.bfloat16], together=1))
def test_what_the_user_writes_is_trained_on(write, dtype):
    found = []
    for resident in (2, 0):
        model, optimizer = made(resident, dtype=dtype)
        run(model, optimizer, numbers(1))
        with torch.no_grad():
            for parameter in model.parameters():
                WRITES[write](parameter)
        losses = run(model, optimizer, numbers(2))
        found.append((model, optimizer))
        assert all(torch.isfinite(loss) for loss in losses)
    assert_same_bits(*found)


@DTYPES
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_every_tensor_has_a_storage_of_its_own(states, dtype, tmp_path):
    """So that a file holds each tensor's bytes, and nobody takes neighbours for tied weights."""
    model, optimizer = made(2, dtype=dtype, states=states)
    run(model, optimizer, numbers(1))
    seen = set()
    for name, parameter in model.named_parameters():
        if name.startswith(("layers.0", "layers.2")):
            state = optimizer.state[parameter]
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            if states == "8bit":
                moments = [tensor for moment in moments for tensor in (moment.codes, moment.exponents)]
            for tensor in (parameter, parameter.data, *moments):
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), name
                assert tensor.is_contiguous()
                assert tensor.storage_offset() == 0
            seen.update(tensor.untyped_storage().data_ptr() for tensor in (parameter, *moments))
            assert parameter.data_ptr() % ALIGNMENT_BYTES == 0
    assert len(seen) == 2 * 6 * (3 if states == "fp32" else 5)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {name: (t.shape, t.dtype) for name, t in loaded.items()} == {
        name: (t.shape, t.dtype) for name, t in model.state_dict().items()
    }
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[name], value), name
    torch.save(model.state_dict(), tmp_path / "model.pt")
    held = sum(t.numel() * t.element_size() for t in loaded.values())
    assert (tmp_path / "model.pt").stat().st_size < held + 1000 * len(loaded)


def test_resident_parameters_are_parameters_where_they_are():
    model, optimizer = made(2)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters() if name.startswith("layers.")}
    run(model, optimizer, numbers(3))
    for name, parameter in model.named_parameters():
        assert type(parameter) is OffloadedParameter
        if name.startswith(("layers.0", "layers.2")):
            assert parameter.data_ptr() == addresses[name]
            assert parameter.device == engine_of(model).device.torch_device


@DTYPES
def test_a_copy_of_the_model_is_an_ordinary_model(dtype):
    model, optimizer = made(2, dtype=dtype)
    run(model, optimizer, numbers(2))
    other = copy.deepcopy(model)
    assert engine_of(other) is None
    assert all(type(p) is nn.Parameter for p in other.parameters())
    assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0.0, atol=0.0)
    batch = numbers(1)[0].to(dtype)
    assert torch.equal(other.eval()(batch), model.eval()(batch))
    with torch.no_grad():
        other.layers[0].up.weight.zero_()
    assert model.layers[0].up.weight.any(), "and has memory of its own"
    again = stronghold.offload(other, device="cpu", resident=3)
    assert stronghold.report(again).resident == 3
    run(again.train(), stronghold.AdamW(again.parameters()), numbers(1))


@pytest.mark.parametrize(
    ("dtype", "places", "states"),
    crossed([torch.float32, torch.bfloat16], [(0, 3), (3, 0), (2, 4)], ["fp32", "8bit"], together=1),
)
def test_optimizer_states_move_between_resident_and_streamed_models(dtype, places, states):
    """Training goes on there as it goes on where the states come from, bit for bit."""
    source = made(places[0], dtype=dtype, states=states)
    run(*source, numbers(3))
    saved = [copy.deepcopy(each.state_dict()) for each in source]
    found = []
    for resident in places:
        model, optimizer = made(resident, dtype=dtype, states=states)
        model.load_state_dict(saved[0])  # a dictionary has the bf16 weights: the low halves begin at zero in both
        optimizer.load_state_dict(saved[1])
        assert_close(optimizer.state_dict(), saved[1], rtol=0.0, atol=0.0)
        run(model, optimizer, numbers(3, seed=5), seed=9)
        found.append((model, optimizer))
    assert_same_bits(*found)
    if dtype is torch.float32:  # where nothing is lost, the one that was saved goes on the same
        run(*source, numbers(3, seed=5), seed=9)
        for parameter, *others in zip(*(each[0].parameters() for each in (source, *found)), strict=True):
            assert all(torch.equal(parameter, other) for other in others)


@pytest.mark.parametrize("resident", [0, 2])
def test_and_to_torch_optim_and_back(resident):
    plain, _ = pair(Residual)
    expected = torch.optim.AdamW(plain.parameters(), **ADAMW)
    model, optimizer = made(resident)
    run(model, optimizer, numbers(2))
    _run_plain(plain, expected, numbers(2))
    fresh, _ = pair(Residual)
    theirs = torch.optim.AdamW(fresh.parameters(), **ADAMW)
    fresh.load_state_dict(model.state_dict())
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again, mine = made(2 - resident)
    again.load_state_dict(plain.state_dict())
    mine.load_state_dict(copy.deepcopy(expected.state_dict()))
    for one, each in ((plain, expected), (fresh, theirs)):
        torch.manual_seed(9)
        ordinary_loop(one, each, numbers(2, seed=5))
    for one, each in ((model, optimizer), (again, mine)):
        run(one, each, numbers(2, seed=5), seed=9)
    for one, each in ((fresh, theirs), (model, optimizer), (again, mine)):
        assert_same_models(one, plain)
        assert_same_states(each, expected)


def test_report_tells_of_them():
    model, optimizer = made(3)
    run(model, optimizer, numbers(2))
    report = stronghold.report(model)
    rows = {name: value for _, name, value in report.rows()}
    assert rows["layers"] == "4, 3 resident, 1 at a time on cpu"
    each = sum(p.numel() for p in model.layers[0].parameters())
    # fp32: the weights, their gradients, and two moments, each tensor aligned.
    assert 3 * 16 * each <= report.resident_device_bytes <= 3 * (16 * each + 6 * 5 * ALIGNMENT_BYTES)
    assert "resident layers" in rows
    assert report.step.fetches == 2 * 1 - 1
    assert "resident" not in str(stronghold.report(pair(Residual)[1]))


def test_resident_layers_cross_the_link_never():
    for resident in range(5):
        model, optimizer = made(resident)
        run(model, optimizer, numbers(3))
        step = stronghold.report(model).step
        streamed = [engine_of(model).layers[i] for i in range(4) if not engine_of(model).layers[i].resident]
        assert step.gradient_bytes == sum(unit.gradients.layout.total_bytes for unit in streamed)
        assert step.fetches == max(0, 2 * len(streamed) - min(2, len(streamed)))


# ---- a trainer ----


class Samples(torch.utils.data.Dataset):
    case: ClassVar = CASES["llama"]

    def __init__(self, count, seed=1):
        self.samples = [{k: v[0] for k, v in batch.items()} for batch in self.case.batches(count, size=1, seed=seed)]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, number):
        return self.samples[number]


def test_the_trainer_trains_a_model_with_resident_layers(tmp_path):
    losses = []
    for model, optimizer in (offloaded(Samples.case, resident=1, window=2), ordinary(Samples.case)):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            max_steps=6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=3,
        )
        trainer = transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=Samples(24),
            eval_dataset=Samples(4, seed=2),
            optimizers=(optimizer, transformers.get_linear_schedule_with_warmup(optimizer, 2, 6)),
        )
        trainer.train()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert len(logged) == 6
        losses.append([*logged, trainer.evaluate()["eval_loss"]])
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)


def test_thirty_steps_with_decay_groups_are_the_streamed_models_to_the_bit():
    case = CASES["gpt"]
    found = []
    for resident in (2, 0):
        model = stronghold.offload(case.model(), device="cpu", window=1, resident=resident)
        optimizer = stronghold.AdamW(decay_groups(model), lr=1e-3)
        found.append((train(model, optimizer, case.batches(30), clip=0.5, warmup=5), snapshot(model, optimizer)))
    assert found[0][0] == found[1][0]
    assert differences(found[0][1], found[1][1]) == []

"""``torch.compile`` around an offloaded model, inside its layers, and of optimizers: exact, and told of."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import stronghold
from tests.crossed import crossed
from tests.delayed import DelayedDevice
from tests.small import ADAMW, Residual, numbers, ordinary_loop, pair

compiler = functools.partial(torch.compile, backend="eager")
SETTINGS = [
    (1, "keep", torch.float32),
    (2, "recompute", torch.bfloat16),
    (4, "host", torch.float32),
]


@pytest.fixture(autouse=True)
def _compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compile_model(model):
    model.compile(backend="aot_eager")
    return model


def compile_forward(model):
    for layer in model.layers:
        layer.forward = compiler(layer.forward)
    return model


def compile_into_layers(model):
    for number, layer in enumerate(model.layers):
        model.layers[number] = compiler(layer)
    return model


def losses(model, optimizer=None, loop=ordinary_loop):
    torch.manual_seed(7)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW) if optimizer is None else optimizer
    batches = [batch.to(next(model.parameters()).dtype) for batch in numbers(3)]
    return [loss.item() for loss in loop(model, optimizer, batches)], optimizer


def states(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def eager(dtype=torch.float32, **offload):
    ours = pair(Residual, dtype=dtype, **offload)[1]
    return losses(ours)[0], states(ours)


def assert_bits(model, got, expected):
    assert got == expected[0]
    for one, other in zip(states(model), expected[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("compiled", "first", "settings"),
    crossed([compile_model, compiler], ["compiled", "offloaded"], SETTINGS, together=1),
)
def test_what_is_compiled_around_layers_changes_no_bit_and_is_told_of(compiled, first, settings):
    window, activations, dtype = settings
    settings = {"window": window, "activations": activations, "dtype": dtype, "device": "cpu"}
    expected = eager(**settings)
    torch.manual_seed(0)
    model = Residual()
    if first == "compiled":
        model = stronghold.offload(compiled(model), **settings)
    else:
        model = compiled(stronghold.offload(model, **settings))
    with pytest.warns(UserWarning, match="torch.compile around an offloaded model leaves the layers") as told:
        got, _ = losses(model)
    assert len([warning for warning in told if "leaves the layers" in str(warning.message)]) == 1
    assert_bits(model, got, expected)


@pytest.mark.parametrize(("window", "activations", "dtype"), SETTINGS)
@pytest.mark.parametrize("compiled", [compile_forward, compile_into_layers])
def test_what_is_compiled_inside_of_layers_is_compiled_and_changes_no_bit(compiled, window, activations, dtype):
    settings = {"window": window, "activations": activations, "dtype": dtype}
    expected = eager(**settings)
    torch.manual_seed(0)
    model = stronghold.offload(compiled(Residual()), layers="layers", device="cpu", **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile around an offloaded model leaves")
        got, _ = losses(model)
    assert counters["stats"]["unique_graphs"] >= 1
    assert_bits(model, got, expected)


@pytest.mark.parametrize("update", ["deferred", "in_backward"])
def test_a_step_compiled_as_a_whole_changes_no_bit(update):
    expected = eager()
    ours = pair(Residual)[1]
    optimizer = stronghold.AdamW(ours.parameters(), **ADAMW, update=update)

    @compiler
    def step(batch):
        loss = ours(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with pytest.warns(UserWarning, match="leaves the layers"):
        got, _ = losses(ours, optimizer, lambda model, optimizer, batches: [step(batch) for batch in batches])
    assert_bits(ours, got, expected)


def test_a_compiled_root_waits_for_the_updates_of_its_parameters():
    settings = {"window": 1, "layers": "layers"}
    expected = eager(**settings)
    device = DelayedDevice(3, updates=0.01, root=0.01)
    model = pair(Residual, **settings, device=device)[1]
    with pytest.warns(UserWarning, match="leaves the layers"):
        got, _ = losses(compiler(model))
    device.settle()
    assert_bits(model, got, expected)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def eight_bit(parameters):
    optim = pytest.importorskip("torchao.optim")
    return optim.AdamW8bit(parameters, lr=1e-2)  # its block size of 256 leaves small moments in fp32


def test_torchao_compiles_its_update_of_offloaded_parameters(monkeypatch):
    def wide():
        model = Residual(layers=4)
        model.into, model.out = nn.Linear(16, 16), nn.Linear(16, 3)
        for layer in model.layers:
            layer.up, layer.down = nn.Linear(16, 256), nn.Linear(256, 16)  # moments of 4096 elements: in eight bits
        return model

    monkeypatch.setattr(torch, "compile", compiler_in_torchao)
    plain, ours = pair(wide, window=1)
    expected, _ = losses(plain, eight_bit(plain.parameters()))
    torch._dynamo.reset()
    got, of_ours = losses(ours, eight_bit(ours.parameters()))
    assert any(type(s["exp_avg"]).__name__ == "OptimState8bit" for s in of_ours.state.values())
    assert counters["stats"]["unique_graphs"] >= 1
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)


def compiler_in_torchao(function, *, _compile=torch.compile, **settings):
    return _compile(function, **{**settings, "backend": "eager"})


def test_compiled_steps_of_optimizers_change_no_bit():
    plain, ours = pair(Residual)
    expected, optimizer = losses(plain, sgd(plain.parameters()))
    optimizer = sgd(ours.parameters())
    optimizer.step = compiler(optimizer.step)
    got, _ = losses(ours, optimizer)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)

    expected = eager()
    ours = pair(Residual)[1]
    optimizer = stronghold.AdamW(ours.parameters(), **ADAMW)
    optimizer.step = compiler(optimizer.step)
    got, _ = losses(ours, optimizer)
    assert_bits(ours, got, expected)


def test_the_wrapper_of_a_compiled_model_is_the_model(tmp_path):
    torch.manual_seed(0)
    inner = Residual()
    model = compiler(inner)
    assert stronghold.offload(model, device="cpu", window=2) is model
    assert stronghold.report(model).layers == stronghold.report(inner).layers == 4
    stronghold.verify(model)
    with pytest.raises(stronghold.errors.OffloadedModelError, match="Residual is offloaded already"):
        stronghold.offload(inner, device="cpu")
    with stronghold.trace(model) as timeline, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, optimizer = losses(model)
    assert timeline.spans()

    stronghold.save(model, tmp_path / "saved")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == dict(inner.named_parameters()).keys()
    for name, value in saved.items():
        assert torch.equal(value, inner.get_parameter(name).detach())

    stronghold.checkpoint.save(tmp_path / "checkpoint", model, optimizer)
    other = pair(Residual)[1]
    stronghold.checkpoint.load(tmp_path / "checkpoint", other, stronghold.AdamW(other.parameters(), **ADAMW))
    for one, another in zip(states(other), states(inner), strict=True):
        assert torch.equal(one, another)
    stronghold.checkpoint.load(tmp_path / "checkpoint", model, optimizer)


def test_one_whole_graph_of_the_model_is_refused():
    model = compiler(pair(Residual)[1], fullgraph=True)
    with pytest.raises(RuntimeError, match=r"torch.compiler.disable|fullgraph=True"):
        model(numbers(1)[0])

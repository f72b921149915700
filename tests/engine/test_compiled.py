"""Compiled layers: one graph for a class of layers, the same numbers as eager ones, and what cannot be compiled said.

Where the question is graphs and guards the backend is ``aot_eager``, which makes no code.
"""

import copy
import inspect
import pickle
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd import runtime_wrappers
from torch.testing import assert_close

import stronghold
from stronghold.engine.find_layers import find_layers
from stronghold.errors import OffloadedModelError
from tests.crossed import crossed
from tests.reference import CASES, VOCABULARY, MasterAdamW, differences, offloaded, snapshot
from tests.small import ADAMW, KINDS, SIZE, Block, Decoder, Frozen, Residual, follow, numbers, pair, words

GRAPHS = {"backend": "aot_eager"}
TOLD = "is not compiled and runs eagerly"


@pytest.fixture(autouse=True)
def _compiler():
    torch._dynamo.reset()
    counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=rf".*({TOLD}|leaves the layers)")
        yield
    torch._dynamo.reset()


def graphs():
    return counters["stats"]["unique_graphs"]


class Steps:
    """The ordinary loop, which counts the graphs that there are after each step."""

    def __init__(self):
        self.graphs = []

    def __call__(self, model, optimizer, batches, passes=1):
        losses = []
        for number, batch in enumerate(batches):
            loss = model(batch)
            loss.backward()
            if (number + 1) % passes == 0:
                optimizer.step()
                optimizer.zero_grad()
                self.graphs.append(graphs())
            losses.append(loss.detach())
        return losses


def states(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def trained(steps=4, build=Residual, update="deferred", **offload):
    """Returns the losses and weights that a model offloaded so comes to, and it."""
    model = pair(build, **offload)[1]
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW, update=update)
    torch.manual_seed(7)
    losses = Steps()(model, optimizer, [batch.to(model.into.weight.dtype) for batch in numbers(steps)])
    return [loss.item() for loss in losses], states(model), model


def assert_bits(got, expected):
    assert got[0] == expected[0]
    for one, other in zip(got[1], expected[1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("activations", ["recompute", "keep", "host"])
def test_a_class_of_layers_is_one_graph_and_steps_make_no_other(activations):
    """Beside plain PyTorch: losses, weights, moments; dropout has the same random numbers, in the second run too."""
    loop, more = Steps(), {"compile": GRAPHS, "activations": activations}
    for window in (1, 2, 4, "auto"):
        model, _ = follow(Residual, numbers(5), loop, window=window, **more)
        report = stronghold.report(model)
        assert (report.compiled, report.not_compiled) == (4, 0)
        assert "compiled layers" in str(report)
    ours = [count for count in loop.graphs if count]
    assert ours
    assert set(ours) == {1}


def test_windows_stores_updates_and_ways_to_keep_activations_change_no_bit(tmp_path):
    expected = trained(window=1, compile=GRAPHS, dtype=torch.bfloat16)
    for number, settings in enumerate(
        [
            {"window": 2, "activations": "keep"},
            {"window": 2, "activations": 2},
            {"window": 2, "activations": "host"},
            {"window": "auto"},
            {"window": "auto", "activations": "keep"},
            {"window": 2, "resident": 2},
            {"window": 2, "update": "in_backward"},
            {"window": 1, "store": str(tmp_path / "disk")},
            {"window": 2, "store": str(tmp_path / "disk 2"), "activations": "keep"},
            {"window": 2, "store": str(tmp_path / "disk 3"), "activations": "disk"},
        ]
    ):
        got = trained(compile=GRAPHS, dtype=torch.bfloat16, **settings)
        assert_bits(got, expected)
        assert stronghold.report(got[2]).compiled == 4, number
    losses, _, _ = trained(window=1, dtype=torch.bfloat16)
    torch.testing.assert_close(expected[0], losses, rtol=1e-2, atol=0)


@pytest.mark.parametrize(
    "kind",
    [
        "chain",
        "structured",
        pytest.param("encoder_decoder", marks=pytest.mark.long),
        "looped",
        "skipping",
        "shared",
        "lending",
    ],
)
def test_models_of_other_kinds_are_compiled(kind):
    kind, loop = KINDS[kind], Steps()
    model, _ = follow(kind.build, kind.batches(4), loop, window=2, layers=kind.layers, compile=GRAPHS)
    assert stronghold.report(model).not_compiled == 0
    assert len(set(loop.graphs[-3:])) == 1


@pytest.mark.parametrize(
    ("window", "activations"),
    [
        pytest.param(2, "recompute", marks=pytest.mark.long),
        pytest.param(1, "keep", marks=pytest.mark.long),
        pytest.param(5, "host", marks=pytest.mark.long),
        ("auto", "keep"),
    ],
)
def test_frozen_layers_and_parameters_are_compiled(window, activations):
    loop = Steps()
    model, _ = follow(Frozen, numbers(6), loop, window=window, compile=GRAPHS, activations=activations)
    assert stronghold.report(model).compiled == 5
    assert len(set(loop.graphs[-3:])) == 1


@pytest.mark.parametrize("activations", [pytest.param("recompute", marks=pytest.mark.long), "host"])
def test_micro_batches_share_a_graph_and_add_up(activations):
    loop = Steps()
    for size in (1, 2, 3):
        follow(
            lambda: Residual(block=lambda: Block(dropout=0)),
            numbers(4),
            loop,
            window=1,
            micro_batch=size,
            activations=activations,
            compile=GRAPHS,
        )
    assert loop.graphs[-4:] == [3] * 4  # of one, of two and of three samples: the rest of three is of one


def test_gradients_that_are_kept_between_passes_make_no_other_graph():
    def accumulate(model, optimizer, batches):
        return loop(model, optimizer, batches, passes=2)

    loop = Steps()
    follow(Residual, numbers(8), accumulate, window=1, compile=GRAPHS)
    assert loop.graphs[4:] == [1] * 4


def twice(model, optimizer, batches):
    for retain in (False, True):
        loss = model(batches[retain])
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("window", "activations"),
    [
        (1, "recompute"),
        pytest.param(1, "host", marks=pytest.mark.long),
        pytest.param(1, "keep", marks=pytest.mark.long),
        ("auto", "keep"),
    ],
)
def test_a_second_backward_pass_of_a_graph_is_torchs_own_error_or_setting(window, activations):
    settings = {"window": window, "compile": GRAPHS, "activations": activations}
    with pytest.raises(RuntimeError, match=r"retain_graph=False.*donated_buffer=False"):
        follow(Residual, numbers(2), twice, **settings)
    torch._dynamo.reset()
    with torch._functorch.config.patch(donated_buffer=False):
        follow(Residual, numbers(2), twice, **settings)


@pytest.mark.parametrize("autocast", [False, True])
def test_evaluation_and_autocast_have_graphs_of_their_own_and_training_goes_on(autocast):
    """Beside plain PyTorch's layers, compiled: under autocast these round otherwise than eager ones."""

    def both(model, optimizer, batches):
        found = []
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found.append((loss.detach(), model(batch)))
            model.train()
            counts.append(graphs())
        return found

    counts, found = [], []
    plain, ours = pair(Residual, window=1, compile=GRAPHS)
    for layer in plain.layers:
        layer.compile(backend="aot_eager")
    for model in (plain, ours):
        counters.clear()
        torch.manual_seed(7)
        optimizer = torch.optim.AdamW if model is plain else stronghold.AdamW
        found.append(both(model, optimizer(model.parameters(), **ADAMW), numbers(3)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    assert counts[3:] == [2, 2, 2]


@pytest.mark.parametrize("first", ["compiled", "offloaded"])
def test_a_layer_that_the_user_compiles_is_compiled_before_offload_and_after(first):
    expected = trained(window=1)
    torch.manual_seed(0)
    model = Residual()
    if first == "offloaded":
        stronghold.offload(model, device="cpu", window=1)
    for layer in model.layers[1:]:
        layer.compile(backend="aot_eager", fullgraph=True)
    if first == "compiled":
        stronghold.offload(model, device="cpu", window=1)
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    torch.manual_seed(7)
    losses = Steps()(model, optimizer, numbers(4))
    assert_bits(([loss.item() for loss in losses], states(model)), expected)
    assert graphs() == 1
    report = stronghold.report(model)
    assert (report.compiled, report.not_compiled) == (3, 0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert "compile" not in vars(copied.layers[1]) or copied.layers[1].compile.__func__ is nn.Module.compile


def test_a_caller_that_is_compiled_as_well_changes_nothing():
    expected = trained(window=1)
    model = pair(Residual, window=1, compile=GRAPHS)[1]
    whole = torch.compile(model, backend="aot_eager")
    optimizer = stronghold.AdamW(model.parameters(), **ADAMW)
    torch.manual_seed(7)
    losses = Steps()(whole, optimizer, numbers(4))
    assert_bits(([loss.item() for loss in losses], states(model)), expected)
    assert stronghold.report(model).compiled == 4


def test_a_call_with_a_cache_runs_eagerly_and_is_said_once():
    with pytest.warns(UserWarning, match=rf"a Attention {TOLD}.*argument is a Cache.*use_cache=False") as told:
        model, _ = follow(Decoder, words(3), Steps(), window=2, compile=GRAPHS)
    assert len([one for one in told if TOLD in str(one.message)]) == 1
    report = stronghold.report(model)
    assert (report.compiled, report.not_compiled) == (0, 4)
    assert "4 ran eagerly" in str(report)


@pytest.mark.parametrize("kind", ["experts", "counting", "stateful"])
def test_a_layer_that_cannot_be_compiled_runs_eagerly_and_is_said_once(kind):
    with pytest.warns(UserWarning, match=TOLD) as told:
        model, _ = follow(KINDS[kind].build, numbers(3), Steps(), window=2, compile=GRAPHS)
    assert len([one for one in told if TOLD in str(one.message)]) == 1
    assert stronghold.report(model).not_compiled == 4


class Running(nn.Module):
    """A layer with a number of its own that each run writes, and that its output comes of."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.up, self.down, self.norm = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("average", torch.zeros(SIZE))

    def forward(self, x):
        up = self.up(x)
        if self.kind == "count":
            self.count.add_(1)
            return x + self.down(up.tanh()) * self.count
        if self.kind == "average":
            self.average.mul_(0.9).add_(0.1 * up.detach().mean((0, 1)))
            return x + self.down(up.tanh() * (1 + self.average))
        if self.kind == "average of the last":
            up = up.tanh() * (1 + self.average)
            self.average.view(1, -1).copy_(up.detach().mean((0, 1))[None])
            return x + self.down(up)
        if self.kind == "only written":
            self.average.mul_(0.9).add_(0.1 * up.detach().mean((0, 1)))
            return x + self.down(up.tanh())
        normal = self.norm(up.flatten(0, 1)).view(up.shape)
        if self.kind == "statistics":
            return x + torch.tanh(self.down(normal) * (1 + self.norm.running_mean)) * self.norm.running_var
        return x + self.down(normal)


@pytest.mark.parametrize(
    ("kind", "activations"),
    crossed(["count", "average", "average of the last", "statistics"], ["recompute", "host", "keep"], together=1),
)
def test_a_layer_that_reads_what_it_writes_in_place_runs_eagerly_and_is_said_once(kind, activations):
    """A loss was 0.47537 where plain PyTorch's is 0.47717: the backward graph had advanced the buffer again."""
    with pytest.warns(UserWarning, match=rf"a Running {TOLD}.*would write an input in place") as told:
        model, _ = follow(
            partial(Residual, block=partial(Running, kind)),
            numbers(4),
            Steps(),
            compile=GRAPHS,
            activations=activations,
        )
    assert len([one for one in told if TOLD in str(one.message)]) == 1
    assert (stronghold.report(model).compiled, stronghold.report(model).not_compiled) == (0, 4)


@pytest.mark.parametrize("kind", ["only written", "batch norm"])
def test_a_layer_that_writes_what_it_does_not_read_is_compiled(kind):
    model, _ = follow(partial(Residual, block=partial(Running, kind)), numbers(4), Steps(), compile=GRAPHS)
    assert (stronghold.report(model).compiled, stronghold.report(model).not_compiled) == (4, 0)


def test_evaluation_of_a_layer_that_reads_what_it_writes_is_compiled():
    plain, model = pair(partial(Residual, block=partial(Running, "average")), compile=GRAPHS)
    with torch.no_grad():
        for batch in numbers(3):
            assert_close(model(batch), plain(batch))
    assert stronghold.report(model).compiled == 4


def test_with_fullgraph_such_a_layer_is_an_error():
    model = pair(KINDS["experts"].build, compile={**GRAPHS, "fullgraph": True})[1]
    with pytest.raises(OffloadedModelError, match=r"with fullgraph=True a layer must be one graph \(got a Experts"):
        model(numbers(1)[0])


def test_hooks_within_a_layer_are_not_left_out():
    def hooked(build):
        def with_hook():
            model = build()
            model.layers[1].up.register_forward_hook(lambda module, args, output: output * 2)
            return model

        return with_hook

    with pytest.warns(UserWarning, match=rf"a Block {TOLD}.*a Linear in it has hooks"):
        model, _ = follow(hooked(Residual), numbers(3), Steps(), window=1, compile=GRAPHS)
    report = stronghold.report(model)
    assert (report.compiled, report.not_compiled) == (3, 1)


def test_a_forward_of_one_modules_own_is_not_taken_for_its_classs():
    def patched():
        model = Residual()
        up = model.layers[2].up
        up.forward = lambda x: F.linear(x, up.weight, up.bias) * 3
        return model

    with pytest.warns(UserWarning, match=rf"a Block {TOLD}.*the forward of a Linear in it is its own"):
        follow(patched, numbers(3), Steps(), window=1, compile=GRAPHS)


@torch._dynamo.config.patch(recompile_limit=2)  # which is the limit before torch 2.13
def test_shapes_beyond_the_limit_run_eagerly_unless_they_are_dynamic(monkeypatch):
    monkeypatch.setattr("stronghold.engine.compiler_settings.RECOMPILES", 2)
    lengths = [torch.randn(2, length, SIZE) for length in (3, 4, 5)]
    build = lambda: Residual(block=lambda: Block(dropout=0))  # noqa: E731
    loop = Steps()
    model, _ = follow(build, lengths, loop, window=1, compile={**GRAPHS, "dynamic": True})
    # One of an input that is a view, as the first layer's is, and one of others; torch 2.15 takes one for both.
    assert loop.graphs[-3:] == [1 if torch.__version__ >= (2, 15) else 2] * 3
    assert stronghold.report(model).compiled == 4
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match=rf"{TOLD}.*graphs already.*dynamic"):
        model, _ = follow(build, lengths, Steps(), window=1, compile=GRAPHS)
    assert stronghold.report(model).not_compiled == 4


def test_an_error_of_the_layers_own_is_raised_as_it_is():
    model = pair(Residual, compile=GRAPHS)[1]
    with pytest.raises(RuntimeError, match=r"Given normalized_shape=\[16\]"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.layers[0](torch.randn(2, 3, SIZE + 1))
    loss = model(numbers(1)[0])
    loss.backward()
    assert stronghold.report(model).compiled == 4


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_compiler_that_the_user_has_switched_off_compiles_nothing(activations):
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        follow(Residual, numbers(3), Steps(), window=1, compile=GRAPHS, activations=activations)
    assert graphs() == 0
    assert any(TOLD in str(one.message) for one in told) == (activations == "recompute")
    follow(Residual, numbers(3), Steps(), window=1, compile=GRAPHS, activations=activations)
    assert graphs() == 1


class Stashing(torch.autograd.Function):
    """Keeps a weight where no hook of autograd's sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class StashingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE) * 0.2)

    def forward(self, x):
        return x + Stashing.apply(x, self.weight)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_a_weight_in_a_graph_that_no_hook_sees_is_refused(activations):
    plain, model = pair(lambda: Residual(block=StashingLayer), window=1, compile=GRAPHS, activations=activations)
    if "no_vc_check" in Path(runtime_wrappers.__file__).read_text():
        with pytest.raises(OffloadedModelError, match=r"a torch.autograd.Function in layers\.0 keeps"):
            model(numbers(1)[0])
        return
    for one in (plain, model):  # PyTorch saved all of it through hooks then
        one(numbers(1)[0]).sum().backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"mode": "reduce-overhead"}, "CUDA graph.*(reduce-overhead|triton.cudagraphs).*mode='default'"),
        ({"mode": "max-autotune"}, "CUDA graph.*max-autotune-no-cudagraphs"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graph.*triton.cudagraphs"),
        ({"backend": "cudagraphs"}, "CUDA graph.*cudagraphs"),
        ("reduce-overhead", "CUDA graph.*compile='reduce-overhead'"),
        ("default", r"names a backend.*compile='default', one of its modes.*pass compile=\{'mode': 'default'\}"),
        ({"backend": "eager"}, "inductor and aot_eager.*got backend='eager' with activations='recompute'.*keep"),
        ({"disable": True}, "compile must be True, a backend's name, or a dictionary"),
        (3, "compile must be True"),
    ],
)
def test_what_layers_cannot_be_compiled_with_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        pair(Residual, compile=asked)
    if isinstance(asked, dict) and "disable" not in asked:
        model = Residual()
        model.layers[0].compile(**asked)
        with pytest.raises(ValueError, match=message):
            stronghold.offload(model, device="cpu", window=1)
        model = pair(Residual)[1]
        with pytest.raises(ValueError, match=message):
            model.layers[0].compile(**asked)


@pytest.mark.parametrize("asked", [True, {"mode": "max-autotune-no-cudagraphs"}])
def test_cuda_graphs_that_inductor_is_configured_to_make_are_refused(asked):
    from torch._inductor import config

    with config.patch({"triton.cudagraphs": True}):
        with pytest.raises(ValueError, match=r"CUDA graph.*got torch._inductor.config.triton.cudagraphs=True"):
            pair(Residual, compile=asked)
        pair(Residual, compile={"options": {"triton.cudagraphs": False}})
        pair(Residual, compile="aot_eager")


def test_a_backend_without_partitions_may_be_used_where_activations_are_kept():
    follow(Residual, numbers(3), Steps(), window=1, compile="eager", activations="keep")
    assert graphs() == 1


class Wide(Residual):
    """Of a width of which no code is in a cache."""

    def __init__(self):
        size = SIZE + 8
        super().__init__(block=lambda: nn.Sequential(Block(size)))
        self.into, self.out = nn.Linear(SIZE, size), nn.Linear(size, 3)


def test_a_compiler_that_is_missing_is_said_and_layers_run_eagerly():
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        fresh_cache(),
        pytest.warns(UserWarning, match=rf"{TOLD}.*InvalidCxxCompiler.*no-such-compiler.*; install one.*CXX"),
    ):
        model, _ = follow(Wide, numbers(2), Steps(), window=1, compile=True)
    assert stronghold.report(model).not_compiled == 4


def test_without_triton_layers_run_eagerly_on_a_gpu_and_it_is_said(monkeypatch):
    """As inductor says it of a GPU; there is none here."""
    from torch._inductor.exc import TritonMissing
    from torch._inductor.scheduler import Scheduler
    from torch._inductor.utils import fresh_cache

    def missing(self, device):
        raise TritonMissing(inspect.currentframe())

    monkeypatch.setattr(Scheduler, "create_backend", missing)
    with fresh_cache(), pytest.warns(UserWarning, match=rf"{TOLD}.*TritonMissing.*working triton installation"):
        model, _ = follow(Wide, numbers(2), Steps(), window=1, compile=True)
    assert stronghold.report(model).not_compiled == 4


def test_inductor_computes_what_eager_does_with_its_random_numbers():
    loop = Steps()
    for settings in ({"window": 1}, {"window": 2, "activations": "keep"}, {"window": "auto", "activations": "host"}):
        follow(Residual, numbers(4), loop, compile=True, **settings)
    assert graphs() == 2  # one computes again in its backward graph


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"window": 1}, torch.float32),
        pytest.param({"window": 2, "activations": "keep"}, torch.bfloat16, marks=pytest.mark.long),
        pytest.param({"window": 4, "activations": "host"}, torch.float32, marks=pytest.mark.long),
        pytest.param({"window": 1, "store": True}, torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_lora_layers_are_compiled(settings, dtype, tmp_path):
    case = CASES["llama"]
    settings = {**settings, "store": tmp_path} if "store" in settings else settings

    def adapted():
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
        return peft.get_peft_model(case.model(3), settings).train()

    found = []
    for compiled in (False, GRAPHS):
        model = stronghold.offload(adapted(), device="cpu", dtype=dtype, compile=compiled, **settings)
        optimizer = stronghold.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        found.append((*run(model, optimizer, case, 6), snapshot(model, optimizer)))
        if not compiled:
            stronghold.close(model)
    assert found[1][1][1:] == [found[1][1][0]] * 5
    assert stronghold.report(model).compiled == 4
    if dtype == torch.float32:
        assert found[1][0] == found[0][0]
        assert differences(found[1][2], found[0][2]) == []
    else:  # the compiler rounds its intermediate results to bf16 in other places
        torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-2, atol=0)


def run(model, optimizer, case, steps=4):
    """Returns the losses of a case's steps, and the number of graphs after each."""
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    losses, counts = [], []
    torch.manual_seed(7)
    for batch in case.batches(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        model.zero_grad()  # a reference's optimizer has masters of its own
        losses.append(loss.item())
        counts.append(graphs())
    return losses, counts


def qwen3_moe():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**decoder(num_hidden_layers=3), **experts))


def gemma3():
    """Layers of two kinds: every second one attends to a window of four."""
    more = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**decoder(), **more))


def decoder(**more):
    settings = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    return (
        {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "attention_dropout": 0.1, "pad_token_id": 0}
        | settings
        | more
    )


MODELS = {name: CASES[name] for name in ("gpt", "llama", "qwen3", "bert", "vit")} | {
    name: replace(CASES["llama"], name=name, build=build, layers=layers)
    for name, build, layers in (("qwen3_moe", qwen3_moe, 3), ("gemma3", gemma3, 4))
}
KINDS_OF_LAYERS = {"gemma3": 2}
EACH_TIME = [("gpt", torch.bfloat16), ("gemma3", torch.float32)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in EACH_TIME else pytest.mark.long)
        for name in MODELS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_it_is_the_same_as_the_model_compiled_without_us(name, dtype):
    """20 steps, every loss and weight, beside fp32 masters in the kernel's order of operations."""
    case = MODELS[name]
    plain = case.model()
    reference = MasterAdamW(plain, dtype=dtype, lr=1e-3)
    for layer in find_layers(plain):
        layer.module.compile(backend="aot_eager")
    expected, _ = run(plain, reference, case, 20)
    assert graphs() > 0
    model, optimizer = offloaded(case, window=1, dtype=dtype, compile=GRAPHS)
    got, _ = run(model, optimizer, case, 20)
    assert got == expected
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def compare(case, settings, *, dtype, steps, backend="aot_eager"):
    """Trains with each of ``settings``: bits among them, rounding beside eager layers, graphs in one step."""
    eager, first, seen = {}, {}, set()
    for one in settings:
        model, optimizer = offloaded(case, dtype=dtype, compile=backend, **one)
        before = graphs()
        got, counts = run(model, optimizer, case, steps)
        assert stronghold.report(model).compiled == case.layers, one
        assert counts[1:] == [counts[1]] * (steps - 1), one
        size = one.get("micro_batch")
        way = one.get("activations", "recompute") == "keep", size
        if way in seen:
            assert counts[-1] == before, one
        else:
            assert 1 <= counts[-1] - before <= KINDS_OF_LAYERS.get(case.name, 1), one
        seen.add(way)
        losses, state = first.setdefault(size, (got, snapshot(model, optimizer)))
        assert got == losses, one
        assert differences(snapshot(model, optimizer), state) == [], one
        if size not in eager:
            eager[size], _ = run(*offloaded(case, window=1, dtype=dtype, micro_batch=size), case, steps)
        rtol = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, eager[size], rtol=rtol, atol=0)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3", marks=pytest.mark.long)])
def test_models_of_transformers_are_compiled(name, tmp_path):
    settings = [{"window": 1}, {"window": 2, "activations": "host"}, {"window": "auto"}]
    compare(MODELS[name], [*settings, {"window": 1, "store": str(tmp_path)}], dtype=torch.float32, steps=4)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_compiled(name, dtype, tmp_path):
    case = MODELS[name]
    settings = [
        {"window": window, "activations": activations}
        for activations in ("recompute", "keep", "host")
        for window in (1, 2, case.layers)
    ]
    settings += [{"window": 1, "store": str(tmp_path / way), "activations": way} for way in ("recompute", "keep")]
    settings += [{"window": 1, "micro_batch": 1, "activations": way} for way in ("recompute", "keep", "host")]
    compare(case, settings, dtype=dtype, steps=20)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_are_compiled_by_inductor(name, dtype, tmp_path):
    # What is computed again is other code, fused in another way, than what is kept.
    case = MODELS[name]
    for ways in (("recompute", "host"), ("keep",)):
        settings = [{"window": window, "activations": way} for way in ways for window in (1, 2, case.layers)]
        settings += [{"window": 1, "activations": ways[0], "store": str(tmp_path / ways[0])}]
        settings += [{"window": 2, "activations": ways[0], "micro_batch": 1}]
        compare(case, settings, dtype=dtype, steps=6, backend="inductor")

"""What a model computes and keeps on paper, beside the same model run for real."""

import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stronghold.engine.planning.computation import ModelComputation
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.planner.op_costs import Op


class Mlp(nn.Module):
    """Layers of products and functions alone, behind and before a linear layer."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def __init__(self, width: int = 24, layers: int = 3, frozen: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))
        self.last = nn.Linear(width, 5)
        if frozen:
            self.first.requires_grad_(False)
            for layer in self.layers:
                layer.up.requires_grad_(False)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


def flops(ops: Counter[Op]) -> int:
    return sum(op.flops * count for op, count in ops.items())


def counted(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("frozen", [False, True])
def test_operations_are_those_of_the_model(frozen):
    """As torch's own counter counts them in a model with values, forward and backward apart."""
    torch.manual_seed(0)
    model, x = Mlp(frozen=frozen), torch.randn(6, 7, 8)
    losses = []
    forward = counted(lambda: losses.append(model(x)))
    backward = counted(losses[0].backward)
    found = ModelComputation(model, list(model.layers), (x,))
    layer, root = found.layer(1), found.root
    assert found.batch == 6
    assert 3 * flops(layer.forward) + flops(root.before) + flops(root.behind) == forward
    of_layers = sum(flops(found.layer(number).backward) for number in range(3))
    assert of_layers + flops(root.before_backward) + flops(root.behind_backward) == backward
    assert found.group_of == ([0, 1, 1] if frozen else [0, 0, 0])  # behind a frozen beginning none asks for a gradient
    assert flops(root.before) == counted(lambda: model.first(x))


def test_frozen_layers_that_no_gradient_reaches_have_no_backward_pass():
    model, x = Mlp(), torch.randn(6, 7, 8)
    model.first.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    backward = counted(model(x).backward)
    found = ModelComputation(model, list(model.layers), (x,))
    assert flops(found.layer(0).backward) == 0
    passes = found.passes(0, None, kept=True)
    assert passes.left_bytes == passes.saved_bytes == passes.backward_bytes == 0
    of_layers = sum(flops(found.layer(number).backward) for number in range(3))
    assert of_layers + flops(found.root.behind_backward) == backward
    assert not found.root.before_backward


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (Mlp(), lambda m: [nn.Linear(2, 2)], "layers of Mlp must run in its forward pass .got none of 1."),
        (Mlp(width=6), lambda m: m.layers, "Mlp must run on tensors that have shapes and no values .got RuntimeError"),
    ],
)
def test_what_cannot_be_computed_is_refused(model, layers, message):
    model.layers[1].down = model.layers[1].down if model.first.out_features > 6 else nn.Linear(24, 7)
    with pytest.raises(ValueError, match=message):
        ModelComputation(model, list(layers(model)), (torch.randn(2, 8),))


class Checking(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return super().forward(x)


def test_a_model_that_asks_for_values_is_refused_with_the_line_that_does():
    model, line = Checking(), Checking.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        ValueError, match=rf"Checking asks for values, in {__file__}, line {line}\); it can be offloaded without a plan"
    ):
        ModelComputation(model, list(model.layers), (torch.randn(2, 8),))


class Checked(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x.isfinite(), lambda: "not finite")
        return super().forward(x)


def test_what_is_checked_of_values_holds_where_there_are_none():
    """Models of transformers for texts with images check so, whose places and features there must be as many of."""
    model, expected, x = Checked(), Mlp(), torch.randn(2, 8)
    found, plain = (ModelComputation(m, list(m.layers), (x,)) for m in (model, expected))
    assert found.layer(0).forward == plain.layer(0).forward
    with pytest.raises(RuntimeError, match="not finite"):
        model(x / 0)


class Dropping(Mlp):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        random.getrandbits(8), np.random.randint(8)  # whichever tokens it masks
        for layer in self.layers:
            if self.draw() < 0.9:
                continue
            x = layer(x)
        return self.last(x).square().mean()


DRAWS = {
    "torch": lambda: torch.rand([]),  # as models of transformers have it
    "python": lambda: random.uniform(0, 1),
    "python, from below": lambda: 0.95 + random.uniform(b=0, a=-0.9),
    "python, of one": lambda: random.random(),
    "numpy": lambda: np.random.uniform(0, 1),
    "numpy, of one": lambda: np.random.random(),
    "numpy, of several": lambda: np.random.rand() if np.random.rand(2).max() < 1 else 0,
}
"""Each is called by its module's name, where it may be another function meanwhile."""


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_model_that_drops_layers_at_random_is_planned_with_all_of_them(draw):
    functions, x = (torch.rand, random.random, random.uniform, np.random.rand, np.random.uniform), torch.randn(2, 8)
    models = Dropping(draw), Mlp()
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    found, plain = (ModelComputation(m, list(m.layers), (x,)) for m in models)
    assert [found.layer(number).forward for number in range(3)] == [plain.layer(number).forward for number in range(3)]
    assert (torch.rand, random.random, random.uniform, np.random.rand, np.random.uniform) == functions
    assert (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()) == before


def test_a_model_that_draws_until_a_number_is_small_is_planned():
    class Rejecting(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while random.random() > 0.5:
                pass
            return super().forward(x)

    model = Rejecting()
    assert not ModelComputation(model, list(model.layers), (torch.randn(2, 8),)).idle


def test_another_thread_draws_as_always_while_a_model_is_planned():
    drawn = []

    def draw():
        thread = threading.Thread(target=lambda: drawn.append((random.random(), np.random.uniform(0, 1))))
        thread.start()
        thread.join()
        return random.random()

    model, x = Dropping(draw), torch.randn(2, 8)
    ModelComputation(model, list(model.layers), (x,))
    assert len(drawn) >= 2
    assert all(0 <= one < 0.9999 for pair in drawn for one in pair)


def saved_bytes(layer: nn.Module, *args: torch.Tensor) -> tuple[int, int]:
    """Returns what autograd has of a layer's run beside its input and parameters, and what its output takes."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = layer(*args)
    for tensor in (*args, *layer.parameters()):
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    storages[out.untyped_storage().data_ptr()] = out.untyped_storage().nbytes()
    return sum(storages.values()), out.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("samples", [1, 2, 6])
def test_bytes_that_are_kept_are_those_that_autograd_keeps(samples, dtype):
    torch.manual_seed(0)
    model, x = Mlp().to(dtype), torch.randn(samples, 7, 8, dtype=dtype)
    told = ModelComputation(model, list(model.layers), (x,)).passes(1, None, kept=True)
    given = torch.randn(samples, 7, 24, dtype=dtype).requires_grad_()
    kept, output = saved_bytes(model.layers[1], given)
    assert told.left_bytes == told.saved_bytes == kept - output


def test_a_transformer_keeps_what_autograd_keeps():
    torch.manual_seed(0)
    config = GPTConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=50)
    model, ids = GPT(config), torch.randint(0, 50, (3, 16))
    seen = []
    hook = model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    model(ids, labels=ids)
    hook.remove()
    x, cos, sin = seen[0]
    kept, output = saved_bytes(model.layers[0], x.detach().requires_grad_(), cos, sin)
    found = ModelComputation(model, list(model.layers), {"input_ids": ids, "labels": ids})
    assert found.passes(0, None, kept=True).left_bytes == kept - output
    assert [p for p in model.parameters() if id(p) in found.root.used_first] == [model.embedding.weight]


def test_nothing_of_the_model_changes():
    model = Mlp()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    ModelComputation(model, list(model.layers), (torch.randn(2, 8),))
    after = dict(model.named_parameters())
    assert {name: id(p) for name, p in after.items()} == {name: one for name, (one, _) in before.items()}
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert all("forward" not in vars(module) and not module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_layers_alike_are_run_once_and_others_for_themselves():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 16), nn.Linear(16, 16))
    found = ModelComputation(model, list(model), (torch.randn(4, 8),))
    assert found.group_of == [0, 1, 1, 3, 4]  # the first one's input needs no gradient
    assert [flops(found.layer(number).forward) for number in range(5)] == [
        2 * 4 * 64,
        2 * 4 * 64,
        2 * 4 * 64,
        2 * 4 * 128,
        2 * 4 * 256,
    ]


def test_layers_of_one_class_and_size_that_get_other_inputs_are_run_for_themselves():
    """As an encoder's layers and a decoder's of the same sizes, which gets other positions."""

    class TwoRows(Mlp):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers[:2]:
                x = layer(x)
            x = x[:, :3].contiguous()
            for layer in self.layers[2:]:
                x = layer(x)
            return self.last(x).square().mean()

    torch.manual_seed(0)
    model, x = TwoRows(layers=4), torch.randn(6, 7, 8)
    losses = []
    forward, backward = counted(lambda: losses.append(model(x))), counted(lambda: losses[0].backward())
    found = ModelComputation(model, list(model.layers), (x,))
    assert found.group_of == [0, 0, 2, 2]
    layers, root = [found.layer(number) for number in range(4)], found.root
    assert sum(flops(layer.forward) for layer in layers) + flops(root.before) + flops(root.behind) == forward
    of_layers = sum(flops(layer.backward) for layer in layers)
    assert of_layers + flops(root.before_backward) + flops(root.behind_backward) == backward
    for number, length in ((1, 7), (3, 3)):
        kept, output = saved_bytes(model.layers[number], torch.randn(6, length, 24, requires_grad=True))
        assert found.passes(number, None, kept=True).left_bytes == kept - output


def test_layers_that_use_keys_and_values_of_others():
    """Gemma 3n's last layers do, of the last one before them of their own attention, by a mapping."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma3nTextConfig(
        vocab_size=32,
        vocab_size_per_layer_input=32,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=48,
        num_hidden_layers=9,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=4,
        laurel_rank=4,
        layer_types=3 * kinds,
        num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.0] * 9,
        attn_implementation="eager",
    )
    model, ids = transformers.Gemma3nForCausalLM(config), torch.randint(32, (2, 7))
    forward = counted(lambda: model(input_ids=ids, labels=ids, use_cache=False))
    layers = list(model.model.layers)
    found = ModelComputation(model, layers, {"input_ids": ids, "labels": ids, "use_cache": False})
    assert found.group_of == [0, 0, 2, 0, 4, 5, 6, 6, 8]
    of_layers = sum(flops(found.layer(number).forward) for number in range(9))
    assert of_layers + flops(found.root.before) + flops(found.root.behind) == forward


def test_a_loss_that_is_recomputed_counts_twice():
    class Recomputed(Mlp):
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return torch.utils.checkpoint.checkpoint(lambda x: self.last(x).square().mean(), x, use_reentrant=False)

    runs = []
    for kind in (Mlp, Recomputed):
        with torch.device("meta"):
            model = kind()
        runs.append(ModelComputation(model, [*model.layers], (torch.empty(6, 7, 8, device="meta"),)).root)
    plain, again = runs
    assert flops(again.behind) == flops(plain.behind) > 0
    assert flops(again.behind_backward) == flops(plain.behind_backward) + flops(plain.behind)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("counted", [False, True])
def test_attention_is_masked_where_it_is_in_training(padding, counted, monkeypatch):
    """transformers leaves the mask out where a sample is one sequence, which it sees by values."""
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config).train()
    inputs = {"input_ids": torch.arange(16).reshape(2, 8)}
    inputs |= {"attention_mask": torch.tensor([[1] * 8, [0] * 2 + [1] * 6])} if padding else {}
    inputs |= {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)} if counted else {}
    attend, masked = torch.nn.functional.scaled_dot_product_attention, []

    def attending(*args, attn_mask=None, is_causal=False, **kwargs):
        masked.append(not is_causal)
        return attend(*args, attn_mask=attn_mask, is_causal=is_causal, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.functional, "scaled_dot_product_attention", attending)
        model(**inputs)
    found = ModelComputation(model, model.model.layers, {**inputs, "labels": inputs["input_ids"]}).layer(0)
    kinds = {op.kind for op in found.forward if op.kind.startswith("attention")}
    assert kinds == {"attention without a mask" if masked[0] else "attention"}
    assert masked[0] == (padding or counted)


def test_cores_share_attention_s_backward_pass_by_heads_of_keys():
    """Of a Llama with three of them for six of queries, and two samples."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=6,
        num_key_value_heads=3,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros((2, 8), dtype=torch.int64)
    found = ModelComputation(model, model.model.layers, {"input_ids": ids, "labels": ids}).layer(0)
    (forward,), (backward,) = ([op for op in ops if "attention" in op.kind] for ops in (found.forward, found.backward))
    assert (forward.sizes, forward.parts) == ((2, 6, 8, 8, 4), 0)
    assert (backward.sizes, backward.parts) == ((2, 6, 8, 8, 4), 6)

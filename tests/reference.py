"""Tiny models with batches, and the ordinary training loop: what the engine is compared with. Holds no tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import stronghold
from stronghold.lab.models.gpt import GPT, GPTConfig
from stronghold.native import Blocks
from stronghold.unit import unit_of
from tests.native_reference import adamw_floats

VOCABULARY = 61
SEQUENCE = 12
MOMENTS = ("exp_avg", "exp_avg_sq")
Batch = dict[str, Tensor]
Optimizer = Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with random weights, and what it is trained on. ``batch`` draws one batch of a size."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    layers: int

    def model(self, seed: int = 0) -> nn.Module:
        """Returns the model with the weights of ``seed``, in training mode."""
        torch.manual_seed(seed)
        return self.build().train()

    def batches(self, count: int, size: int = 2, seed: int = 1) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [self.batch(generator, size) for _ in range(count)]

    def __str__(self) -> str:
        return self.name


def _ids(generator: torch.Generator, size: int, length: int = SEQUENCE) -> Tensor:
    """Counts up from a number in steps of 1 to 3: something to learn."""
    start = torch.randint(0, VOCABULARY, (size, 1), generator=generator)
    stride = torch.randint(1, 4, (size, 1), generator=generator)
    return 2 + (start + stride * torch.arange(length)) % (VOCABULARY - 2)


def _causal(generator: torch.Generator, size: int) -> Batch:
    ids = _ids(generator, size)
    return {"input_ids": ids, "labels": ids}


def _padded(generator: torch.Generator, size: int) -> Batch:
    """Texts of different lengths: the padding is masked and has no label."""
    ids = _ids(generator, size)
    lengths = torch.randint(SEQUENCE // 2, SEQUENCE + 1, (size, 1), generator=generator)
    mask = torch.arange(SEQUENCE)[None] < lengths
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


def _masked(generator: torch.Generator, size: int) -> Batch:
    batch = _padded(generator, size)
    chosen = torch.rand(batch["labels"].shape, generator=generator) < 0.3
    chosen[:, 0] = True
    return {
        "input_ids": batch["input_ids"].masked_fill(chosen, 1),
        "attention_mask": batch["attention_mask"],
        "labels": batch["labels"].masked_fill(~chosen, -100),
    }


def _translation(generator: torch.Generator, size: int) -> Batch:
    batch = _padded(generator, size)
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": batch["attention_mask"],
        "labels": _ids(generator, size, SEQUENCE - 3),
    }


def _images(side: int) -> Callable[[torch.Generator, int], Batch]:
    def batch(generator: torch.Generator, size: int) -> Batch:
        pixels = torch.randn(size, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (size,), generator=generator)}

    return batch


def _gpt() -> nn.Module:
    return GPT(GPTConfig(layers=4, hidden=16, heads=2, sequence=SEQUENCE, vocabulary=VOCABULARY, dropout=0.1))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def _decoder(**more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": SEQUENCE,
        "attention_dropout": 0.1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    return settings | more


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_decoder()))


def _qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_decoder(head_dim=8, tie_word_embeddings=True)))


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_decoder(num_hidden_layers=3), **experts))


def _qwen2_moe() -> nn.Module:
    """Layers of two kinds: the first is dense, the others have experts and a shared one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [0]}
    settings = _decoder(num_hidden_layers=3, shared_expert_intermediate_size=8)
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**settings, **experts))


def _gpt_neox() -> nn.Module:
    settings = _decoder(hidden_dropout=0.1)
    del settings["num_key_value_heads"]
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**settings))


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=SEQUENCE,
    )
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=SEQUENCE,
        attention_dropout=0.1,
        activation_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
        forced_eos_token_id=1,
    )
    return transformers.BartForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=8,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


def _swin() -> nn.Module:
    """Two stages, each a row of its own, with layers of different sizes."""
    config = transformers.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
        num_labels=5,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        drop_path_rate=0.1,
    )
    return transformers.SwinForImageClassification(config)


def _resnet() -> nn.Module:
    """Convolutions with batch norms, whose running statistics are buffers that the forward pass changes."""
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[2, 2], layer_type="basic", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


CASES = {
    case.name: case
    for case in (
        Case(name="gpt", build=_gpt, batch=_causal, layers=4),
        Case(name="gpt2", build=_gpt2, batch=_padded, layers=4),
        Case(name="llama", build=_llama, batch=_padded, layers=4),
        Case(name="qwen3", build=_qwen3, batch=_causal, layers=4),
        Case(name="mixtral", build=_mixtral, batch=_causal, layers=3),
        Case(name="qwen2_moe", build=_qwen2_moe, batch=_padded, layers=3),
        Case(name="gpt_neox", build=_gpt_neox, batch=_causal, layers=4),
        Case(name="bert", build=_bert, batch=_masked, layers=4),
        Case(name="t5", build=_t5, batch=_translation, layers=4),
        Case(name="bart", build=_bart, batch=_translation, layers=4),
        Case(name="vit", build=_vit, batch=_images(8), layers=4),
        Case(name="swin", build=_swin, batch=_images(16), layers=2),
        Case(name="resnet", build=_resnet, batch=_images(32), layers=2),
    )
}


def decay_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Matrices decay; biases and the weights of norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def train(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    accumulation: int = 1,
    clip: float | None = None,
    warmup: int = 0,
    seed: int = 7,
) -> list[float]:
    """The ordinary loop; returns the loss of every backward pass. It knows nothing of offloading."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (warmup + 1)))
    torch.manual_seed(seed)
    losses = []
    masters = optimizer if isinstance(optimizer, MasterAdamW) else None
    for number, batch in enumerate(batches):
        loss = model(**batch).loss
        (loss / accumulation).backward()
        losses.append(loss.item())
        if masters is not None:
            masters.add_up()
        if (number + 1) % accumulation == 0:
            if clip is not None:
                if masters is not None:
                    masters.publish()
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def rounded_to(dtype: torch.dtype, values: Tensor) -> Tensor:
    """Returns ``values`` in ``dtype``: in bf16 the nearest number, and of two equally near the larger in magnitude."""
    if dtype != torch.bfloat16:
        return values.to(dtype)
    exact = values.double()
    unit = torch.exp2((torch.frexp(exact).exponent - 8).clamp(min=-133).double())  # 8 significant bits
    return (exact.sign() * (exact.abs() / unit + 0.5).floor() * unit).to(dtype)


class MasterAdamW(torch.optim.AdamW):
    """``torch.optim.AdamW`` on fp32 copies of the parameters: mixed precision without an engine.

    A step is that of ``tests/native_reference.py``, which has the order of operations that the engine's kernel
    promises; ``tests/test_native_floats.py`` compares it with float64. ``grad_scale`` multiplies the gradients.
    ``model`` computes in ``dtype`` from now on; its buffers stay as they are. Gradients of several backward passes are
    added in fp32; who looks at a sum (to clip it) sees it rounded.
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, weight_decay: float = 0.1, lr: float, eps: float = 1e-8
    ) -> None:
        groups = decay_groups(model, weight_decay)
        self.pairs = [(p, p.detach().to(torch.float32, copy=True)) for group in groups for p in group["params"]]
        masters = iter(master for _, master in self.pairs)
        super().__init__([{**g, "params": [next(masters) for _ in g["params"]]} for g in groups], lr=lr, eps=eps)
        self.sums: dict[Tensor, Tensor] = {}
        self.grad_scale = 1.0
        for parameter in model.parameters():
            parameter.data = rounded_to(dtype, parameter.data)

    def add_up(self) -> None:
        """Takes the gradients of one backward pass."""
        for parameter, _ in self.pairs:
            if parameter.grad is not None:
                self.sums[parameter] = self.sums.get(parameter, 0.0) + parameter.grad.float()
                parameter.grad = None

    def publish(self) -> None:
        """Makes the sums the parameters' gradients."""
        for parameter, total in self.sums.items():
            parameter.grad = rounded_to(parameter.dtype, total)
        self.sums.clear()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = {master: group for group in self.param_groups for master in group["params"]}
        for parameter, master in self.pairs:
            gradient, group = self.sums.pop(parameter, parameter.grad), groups[master]
            if gradient is None:
                continue
            state = self.state[master]
            if not state:
                state.update(step=torch.tensor(0.0), **{name: torch.zeros_like(master) for name in MOMENTS})
            state["step"] += 1
            kept = (master, *(state[name] for name in MOMENTS))
            new = adamw_floats(
                *(tensor.numpy() for tensor in kept),
                gradient.float().numpy(),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=int(state["step"]),
                grad_scale=self.grad_scale,
            )
            for tensor, values in zip(kept, new, strict=True):
                tensor.copy_(torch.from_numpy(values))
            parameter.copy_(rounded_to(parameter.dtype, master))

    @torch.no_grad()
    def take_writes(self, block: int, in_blocks: list[Tensor]) -> None:
        """Takes over what was written into the parameters; where one still is its master's rounding, nothing was.

        In the parameters ``in_blocks`` a write counts for its block, of ``block`` elements counted from the first.
        """
        whole = {id(parameter) for parameter in in_blocks}
        for parameter, master in self.pairs:
            same = parameter == rounded_to(parameter.dtype, master)
            if id(parameter) in whole:
                parts = same.flatten().split(block)
                same = torch.cat([part.all().expand(len(part)) for part in parts]).view(same.shape)
            master.copy_(torch.where(same, master, parameter.to(master.dtype)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter, _ in self.pairs:
            parameter.grad = None


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    """Returns copies of every parameter with its moments, and of every buffer, by their names, for comparison."""
    masters = {id(p): master for p, master in optimizer.pairs} if isinstance(optimizer, MasterAdamW) else {}
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(masters.get(id(parameter), parameter), {})
        found[name] = {"weight": parameter.detach().cpu().clone()}
        for key in MOMENTS:
            if key in state and isinstance(state[key], Blocks):
                found[name].update(
                    {f"{key} {part}": getattr(state[key], part).clone() for part in ("codes", "exponents")}
                )
            elif key in state:
                found[name][key] = state[key].detach().cpu().float().clone()
        if (unit := unit_of(parameter)) is not None and unit.masters:
            found[name]["master"] = unit.master(parameter.__dict__["_index"]).cpu().clone()
    found.update((name, {"buffer": buffer.detach().cpu().clone()}) for name, buffer in model.named_buffers())
    return found


def differences(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> list[str]:
    """Names what is not the same to the bit in two snapshots."""
    assert {n: sorted(t) for n, t in one.items()} == {n: sorted(t) for n, t in other.items()}
    return [
        f"{n} {key}" for n, tensors in one.items() for key in tensors if not torch.equal(tensors[key], other[n][key])
    ]


def offloaded(
    case: Case, *, weight_decay: float = 0.1, lr: float = 1e-3, adamw: dict[str, Any] | None = None, **settings: Any
) -> tuple[nn.Module, stronghold.AdamW]:
    """Returns the offloaded model of ``case`` and its optimizer, with decay groups."""
    model = stronghold.offload(case.model(), device="cpu", **settings)
    return model, stronghold.AdamW(decay_groups(model, weight_decay), lr=lr, **(adamw or {}))


def ordinary(case: Case, *, weight_decay: float = 0.1, lr: float = 1e-3, **adamw: Any) -> tuple[nn.Module, Optimizer]:
    """Returns the model of ``case`` as it is, with torch's own AdamW."""
    model = case.model()
    return model, torch.optim.AdamW(decay_groups(model, weight_decay), lr=lr, **adamw)

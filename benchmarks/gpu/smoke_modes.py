"""The modes that smoke.py runs, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

VOCABULARY = 512
GPT_SHAPE: dict[str, Any] = {"layers": 6, "hidden": 128, "heads": 4, "sequence": 64, "vocabulary": VOCABULARY}
LLAMA: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = LLAMA | {
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@dataclass(frozen=True, kw_only=True)
class Learner:
    """What learns: ``model`` "gpt", "llama" or "qwen3-moe", the last two of transformers; by AdamW, or ``muon``.

    Parameters whose names do not end with ``trained`` are frozen. Batches are cut into ``accumulate`` parts. With
    ``int8`` the weights of linear layers are torchao's, quantised to 8 bits and frozen.
    """

    model: str = "gpt"
    dtype: str = "fp32"
    muon: bool = False
    trained: str = ""
    accumulate: int = 1
    clip: float | None = None
    int8: bool = False


@dataclass(frozen=True, kw_only=True)
class Mode(Learner):
    """A way to train: the settings of ``stronghold.offload``, and of its optimizer.

    "DISK" stands for a folder, "COMPILED" for what layers are compiled by on the device.
    With ``replica`` it is one of one, with ``resumes`` a checkpoint is saved after two steps and loaded into a new
    model, with ``traced`` a timeline is recorded.
    """

    offload: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    replica: bool = False
    resumes: bool = False
    traced: bool = False

    @property
    def compiles(self) -> bool:
        return "compile" in self.offload

    @property
    def learner(self) -> Learner:
        """What plain PyTorch trains beside it."""
        return Learner(**{each.name: getattr(self, each.name) for each in fields(Learner)})


IN_BACKWARD, EIGHT_BIT = {"update": "in_backward"}, {"states": "8bit"}
MODES: dict[str, Mode] = {
    "window 2": Mode(offload={"window": 2}),
    "window 1": Mode(offload={"window": 1}),
    "window 6, all": Mode(offload={"window": 6}),
    "window auto": Mode(),
    "bf16": Mode(offload={"window": 2}, dtype="bf16"),
    "in_backward": Mode(offload={"window": 2}, optimizer=IN_BACKWARD),
    "bf16, in_backward": Mode(offload={"window": 2}, optimizer=IN_BACKWARD, dtype="bf16"),
    "bf16, 8-bit moments": Mode(offload={"window": 2}, optimizer=EIGHT_BIT, dtype="bf16"),
    "bf16, 8-bit moments, in_backward": Mode(offload={"window": 3}, optimizer=EIGHT_BIT | IN_BACKWARD, dtype="bf16"),
    "activations kept": Mode(offload={"window": 2, "activations": "keep"}),
    "activations on the host": Mode(offload={"window": 2, "activations": "host"}),
    "activations of 2 layers kept": Mode(offload={"window": 2, "activations": 2}),
    "activations on disk": Mode(offload={"window": 2, "activations": "disk", "store": "DISK"}),
    "micro-batches": Mode(offload={"window": 2, "micro_batch": 1}),
    "micro-batches, activations on the host": Mode(offload={"window": 2, "micro_batch": 2, "activations": "host"}),
    "resident 3": Mode(offload={"window": 2, "resident": 3}),
    "resident 3, bf16, in_backward": Mode(offload={"window": 2, "resident": 3}, optimizer=IN_BACKWARD, dtype="bf16"),
    "resident auto": Mode(offload={"resident": "auto", "device_memory": "8MiB"}),
    "resident, all": Mode(offload={"resident": 6}, dtype="bf16"),
    "accumulating": Mode(offload={"window": 2}, accumulate=2),
    "clipping": Mode(offload={"window": 2}, optimizer={"max_grad_norm": 1.0}, clip=1.0),
    "from disk": Mode(offload={"window": 2, "store": "DISK"}),
    "from disk, bf16, in_backward": Mode(offload={"window": 2, "store": "DISK"}, optimizer=IN_BACKWARD, dtype="bf16"),
    "from disk, 8-bit moments": Mode(offload={"window": 2, "store": "DISK"}, optimizer=EIGHT_BIT, dtype="bf16"),
    "from disk, what fits kept": Mode(offload={"window": 2, "store": "DISK", "host_memory": "256MiB"}),
    "a checkpoint": Mode(offload={"window": 2}, resumes=True),
    "a trace": Mode(offload={"window": 2}, traced=True),
    "a replica of one": Mode(offload={"window": 2}, replica=True),
    "transformers' Llama": Mode(offload={"window": 2}, model="llama"),
    "transformers' Llama, bf16, in_backward": Mode(
        offload={"window": 2}, optimizer=IN_BACKWARD, dtype="bf16", model="llama"
    ),
    "transformers' Qwen3-MoE": Mode(offload={"window": 2}, model="qwen3-moe"),
    "experts, two at a time": Mode(offload={"window": 2, "experts_per_part": 2}, model="qwen3-moe"),
    "biases alone, bf16": Mode(offload={"window": 2}, trained=".bias", dtype="bf16"),
    "biases alone, from disk, in_backward": Mode(
        offload={"window": 2, "store": "DISK"}, optimizer=IN_BACKWARD, trained=".bias"
    ),
    "biases of an 8-bit model": Mode(offload={"window": 2}, trained=".bias", int8=True),
    "biases of an 8-bit model, bf16, from disk": Mode(
        offload={"window": 2, "store": "DISK"}, trained=".bias", int8=True, dtype="bf16"
    ),
    "biases of an 8-bit model, activations on the host": Mode(
        offload={"window": 2, "activations": "host"}, trained=".bias", int8=True
    ),
    "Muon": Mode(offload={"window": 2}, muon=True),
    "Muon, from disk, in_backward": Mode(offload={"window": 2, "store": "DISK"}, optimizer=IN_BACKWARD, muon=True),
    "compiled": Mode(offload={"window": 2, "compile": "COMPILED"}),
    "compiled, bf16, activations kept": Mode(
        offload={"window": 2, "compile": "COMPILED", "activations": "keep"}, dtype="bf16"
    ),
}

"""What a profile's files leave unsaid of the models that Aceso profiles: GPT, T5 and Wide-ResNet.

The files have one line for each operator of a layer. Which operators come once for each layer, which of them keep no
tensor of their own for the backward pass, where a recomputed run of operators ends, and how the operators' tensors lie
on the devices is known by the operators' names alone. The facts are those of Aceso's artifact (Liu et al., EuroSys
2024, https://github.com/microsoft/SuperScaler, branch Aceso).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stronghold.planner.profiled.layouts import Share, TensorLayout

Layouts = Callable[[str, Share], tuple[TensorLayout | None, TensorLayout | None]]
"""Of an operator's name and its choice: the layouts of its input and its output."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kind of model.

    ``rows`` is the number of a profile's lines, None for any, and ``repeated`` are the lines (begin, end) that come
    once for each layer. ``copies`` is what weights, gradients, masters and moments take together, in bytes for each
    byte of weights. ``layouts`` is None where nothing is known of them: the operators of a stage then share one choice.
    """

    name: str
    copies: int
    rows: int | None = None
    repeated: tuple[tuple[int, int], ...] = ()
    begins: Callable[[str], bool] = lambda name: False
    """Whether an operator is the first of a block: its input is kept, and a recomputed run ends before it."""
    kept: frozenset[str] = frozenset()
    """Operators that are never recomputed."""
    share: Callable[[str], float] = lambda name: 1.0
    """The part of an operator's activations that no other operator holds as well."""
    layouts: Layouts | None = None


def family_of(model: str) -> Family:
    """Returns the family of a profile's name, such as ``gpt_1_3B``; any other name is a row of operators in fp32."""
    return FAMILIES.get(model.split("_")[0], OTHER)


def _transformer_share(name: str) -> float:
    return {"enc-attention-softmax": 0.0, "enc-attention-dropout": 1.5}.get(name, 1.0)


def _resnet_share(name: str) -> float:
    in_place = name == "bn1" or "-bn3" in name or ("-downsample" in name and "0-0" not in name)
    return 0.0 if in_place else 1.0


def _gpt_layouts(name: str, choice: Share) -> tuple[TensorLayout | None, TensorLayout | None]:
    degree, replicas, algorithm = choice
    whole = TensorLayout(degree, (1, replicas, 1))  # sequence, samples, width
    by_width = TensorLayout(1, (1, replicas, degree))
    by_head = TensorLayout(1, (replicas, degree, 1))  # samples, heads, width
    by_sample = TensorLayout(degree, (replicas, 1, 1))
    if name in ("enc-attention-qkv", "enc-MLP-GEMM-1"):
        return (by_width, whole) if algorithm else (whole, by_width)
    if name in ("enc-attention-dense", "enc-MLP-GEMM-2"):
        return (whole, by_width) if algorithm else (by_width, whole)
    known: Mapping[str, tuple[TensorLayout | None, TensorLayout | None]] = {
        "encoder-embedding": (None, whole),
        "enc-attention-score": (by_width, by_head),
        "enc-attention-softmax": (by_head, by_head),
        "enc-attention-dropout": (by_head, by_head),
        "enc-attention-context": (by_head, by_width),
        "enc-MLP-gelu": (by_width, by_width),
        "final-layernorm": (whole, by_sample),
        "gpt-post-process": (by_sample, None),
    }
    return known.get(name, (whole, whole))


def _resnet_layouts(name: str, choice: Share) -> tuple[TensorLayout | None, TensorLayout | None]:
    whole = TensorLayout(choice.degree, (choice.replicas, 1, 1))
    return whole, whole


FAMILIES: Mapping[str, Family] = {
    "gpt": Family(
        name="gpt",
        copies=8,
        rows=16,
        repeated=((1, 14),),
        begins=lambda name: name == "enc-1st-layernorm",
        kept=frozenset(("encoder-embedding", "gpt-post-process")),
        share=_transformer_share,
        layouts=_gpt_layouts,
    ),
    "t5": Family(
        name="t5",
        copies=8,
        rows=39,
        repeated=((1, 14), (16, 37)),
        begins=lambda name: name == "enc-1st-layernorm",
        kept=frozenset(("encoder-embedding", "decoder-embedding", "t5-post-process")),
        share=_transformer_share,
    ),
    "resnet": Family(
        name="resnet",
        copies=4,
        begins=lambda name: "-conv1" in name,
        kept=frozenset(("conv1",)),
        share=_resnet_share,
        layouts=_resnet_layouts,
    ),
}
OTHER = Family(name="other", copies=4)

"""How the layers of a model are compiled: what ``offload(compile=...)`` and ``layer.compile(...)`` ask for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stronghold.settings import compile_arguments, refuse_cuda_graphs

PARTITIONED = ("inductor", "aot_eager")
"""The backends whose backward graph can compute the forward pass again: AOTAutograd cuts the two apart for them."""

RECOMPILES = 16
"""Graphs of a class of layers: of its kinds, of shapes, of training and evaluation, and of a process's models."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CompilerSettings:
    """How a layer is compiled.

    ``inner`` is the backend as torch.compile has wrapped it, with its mode and options. With ``strict``, which is
    ``fullgraph=True``, what cannot be compiled is an error; without, it runs eagerly and the user is told.
    """

    inner: Callable[..., Any]
    name: str
    dynamic: bool
    strict: bool

    @classmethod
    def of(cls, asked: bool | str | Mapping[str, Any]) -> CompilerSettings | None:
        """Returns what ``offload(compile=asked)`` or ``layer.compile(**asked)`` means; None for False.

        Raises ValueError for what a layer cannot be compiled with, and what torch.compile raises for what it does not
        know.
        """
        arguments = compile_arguments(asked)
        return None if arguments is None else _read(torch.compile(_probe, **arguments))

    @classmethod
    def taken_from(cls, module: nn.Module) -> CompilerSettings | None:
        """Returns what ``module.compile(...)`` has asked for, and makes ``module`` one that is not compiled."""
        compiled = module._compiled_call_impl
        if compiled is None:
            return None
        settings = _read(compiled)
        module._compiled_call_impl = None
        return settings

    def check_activations(self, activations: int | str) -> None:
        """Raises ValueError where the backend would keep what ``activations`` says is computed again."""
        if activations != "keep" and self.name not in PARTITIONED:
            raise ValueError(
                f"a compiled layer is computed again inside of its backward graph, which {' and '.join(PARTITIONED)} "
                f"can make (got backend={self.name!r} with activations={activations!r}); use one of these, or "
                "activations='keep'"
            )

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``function`` compiled: one graph for each set of guards, or an error."""
        more: dict[str, Any] = (
            {"recompile_limit": RECOMPILES} if "recompile_limit" in signature(torch.compile).parameters else {}
        )
        return torch.compile(function, backend=Backend(self.inner), dynamic=self.dynamic, fullgraph=True, **more)


@dataclass(frozen=True, eq=False)
class Backend:
    """What torch.compile calls for a graph: the backend, under the configuration that a layer in a window needs.

    A graph's guards do not see that configuration. The compiler's cache compares backends, and two of these are equal
    where what they call is.
    """

    inner: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(Backend)

    def __call__(self, graph: Any, inputs: Any) -> Any:
        import torch._inductor.config as inductor_config

        from stronghold.engine.graph_writes import written_inputs  # imported with the compiler alone

        if torch.is_grad_enabled() and (names := written_inputs(graph)):
            raise NotCompiledError(
                f"its graph would write an input in place that its outputs come of ({names[0]}, a buffer or argument), "
                "and its backward graph would begin with what was written; write a clone(), or what nothing else reads"
            )
        # Inductor has random numbers of its own, and dropout would be another than PyTorch's.
        as_eager = {} if "fallback_random" in getattr(self.inner, "config", {}) else {"fallback_random": True}
        with inductor_config.patch(as_eager):
            return self.inner(graph, inputs)


class NotCompiledError(Exception):
    """What was to be compiled was called as it is, or is a graph whose gradients would be others than eager ones."""


@functools.lru_cache(maxsize=64)
def recomputing(own: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes what ``own`` does and, compiled, computes it again in its backward graph.

    That graph gets the same random numbers again. Its code is its own, for the compiler's cache goes by that.
    """

    def recompute(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # as it is, it would be computed again without the window's weights
            raise NotCompiledError("torch.compile has left it as it is; is it disabled, by set_stance() for instance?")

        def compute(*args: Any) -> Any:
            return own(*args, **kwargs)

        return checkpoint(compute, *args, use_reentrant=False)

    recompute.__code__ = recompute.__code__.replace(co_name=f"{own.__qualname__}_again")
    return recompute


def _probe() -> None:
    """Stands for the function while settings are read."""


def _has_cuda_graphs() -> bool:
    """Whether inductor makes CUDA graphs by default: by its configuration, or TORCHINDUCTOR_CUDAGRAPHS=1."""
    import torch._inductor.config as inductor_config

    return bool(inductor_config.triton.cudagraphs)


def _read(compiled: Callable[..., Any]) -> CompilerSettings:
    """Reads backend and settings of what torch.compile has returned, which has no name for them."""
    from torch._dynamo.eval_frame import OptimizeContext

    cells = getattr(compiled, "__closure__", None) or ()
    contexts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, OptimizeContext)]
    if not contexts:
        raise ValueError(
            f"the settings of a compiled layer must be readable (got {compiled!r}, which this version of torch made "
            "otherwise); leave layer.compile() out and pass offload(..., compile={...})"
        )
    context = contexts[0]
    inner: Any = context.callback
    assert callable(inner)
    while hasattr(inner, "_torchdynamo_orig_backend"):  # as dynamo unwraps it, by functions of other names since 2.9
        inner = inner._torchdynamo_orig_backend
    if (options := getattr(inner, "config", {})).get("triton.cudagraphs"):
        refuse_cuda_graphs(f"options={options!r}")
    name = str(getattr(inner, "compiler_name", inner))
    if name == "cudagraphs":
        refuse_cuda_graphs("backend='cudagraphs'")
    if name == "inductor" and "triton.cudagraphs" not in getattr(inner, "config", {}) and _has_cuda_graphs():
        refuse_cuda_graphs("torch._inductor.config.triton.cudagraphs=True")
    return CompilerSettings(inner=inner, name=name, dynamic=bool(context._dynamic), strict=context.fullgraph)

"""What ``torch.compile`` is not to look into."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame
from torch._C._dynamo.eval_frame import get_eval_frame_callback

C = TypeVar("C", bound=Callable)

# What torch._dynamo.skip sets, without an import of the compiler.
_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def opaque(function: C) -> C:
    """Keeps ``function``, and all that it calls, out of compiled graphs: they break here, and it runs as written.

    What it does to memory (waits for an update, moves a layer, notes a write) has to happen in each call, where a graph
    would have it happen once, while it is traced. Unlike ``torch.compiler.disable`` this neither imports the compiler
    nor takes 2 microseconds a call where nothing is compiled: a layer's pass has some fifty of them.
    """
    within = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if get_eval_frame_callback() is None else within(*args, **kwargs)

    return cast(C, as_written(call))


def as_written(function: C) -> C:
    """Keeps ``function`` itself out of compiled graphs, and what it calls only where that is opaque, too."""
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function

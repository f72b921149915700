"""Says of an error of the model's own, on tensors without memory, what was tried."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from stronghold.engine.joining import NotCutError

_NOT_THE_MODELS = tuple(f"{path}{os.sep}" for path in (Path(torch.__file__).parent, Path(__file__).parents[2]))


@contextmanager
def explained(model: nn.Module) -> Iterator[None]:
    """Raises ValueError in the place of what the block raises."""
    try:
        yield
    except NotCutError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"a model that is planned for must compute by the shapes of tensors alone ({type(model).__name__} asks for "
            f"values, {_where(error)}); it can be offloaded without a plan, by window and other settings"
        ) from error
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} must run on tensors that have shapes and no values (got {type(error).__name__}: "
            f"{error}); pass the inputs= and the loss= that it needs, or the dtype= that its operators ask for"
        ) from error


@contextmanager
def explained_cut(layer: str, samples: int, batch: int) -> Iterator[None]:
    """Raises NotCutError in the place of what a layer raises over ``samples`` of a ``batch``, where they are fewer.

    The layer has computed the whole batch before: what it cannot compute is the part.
    """
    try:
        yield
    except NotCutError:
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        if samples >= batch:
            raise
        raise NotCutError(
            f"micro_batch needs the batch as first dimension of what a layer gets, and of what it takes it from (got "
            f"{layer}, over {samples} of {batch} samples: {type(error).__name__}: {error}); leave out micro_batch"
        ) from error


def _where(error: BaseException) -> str:
    """Returns the last line of the model's own that the error came by."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_MODELS)]
    return f"in {frames[-1].filename}, line {frames[-1].lineno}" if frames else "within PyTorch"

"""What goes from stage to stage, found without computing anything."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stronghold.distributed.trained import ByStage
from stronghold.errors import ParallelError
from stronghold.formats.kept_in_fp32 import computes_in


class Shapes:
    """The stages of a model on the meta device, in the type that they compute in.

    To be made before the model is offloaded. It takes no memory for values.
    """

    def __init__(self, stages: Sequence[nn.Module], dtype: torch.dtype | None) -> None:
        memo: dict[int, Any] = {}
        for stage in stages:
            for parameter in stage.parameters():
                meta = torch.empty_like(parameter, dtype=computes_in(parameter, dtype), device="meta")
                memo[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
            for buffer in stage.buffers():
                memo[id(buffer)] = torch.empty_like(buffer, device="meta")
            for module in stage.modules():
                for hooks in (module._forward_pre_hooks, module._forward_hooks):
                    memo[id(hooks)] = _of_torch(hooks)
        self._stages = [copy.deepcopy(stage, memo) for stage in stages]
        self._known: dict[tuple[Any, ...], list[Tensor]] = {}
        """What was found, by the shape of the inputs: for a small model that takes longer than its steps."""

    def train(self, trained: ByStage) -> None:
        """Called when others of the stages' parameters are trained than when this was made, or last called."""
        for number, stage in enumerate(self._stages):
            for name, parameter in stage.named_parameters():
                parameter.requires_grad_(trained[number].get(name, parameter.requires_grad))
        self._known.clear()

    def between(self, inputs: Tensor) -> list[Tensor]:
        """Returns, on the meta device, what each stage takes from ``inputs`` on, and what the last one returns.

        Raises ParallelError for a stage that does not make one tensor of one tensor.
        """
        kind = (inputs.shape, inputs.stride(), inputs.dtype)
        if kind not in self._known:
            self._known[kind] = self._find(inputs)
        return self._known[kind]

    def _find(self, inputs: Tensor) -> list[Tensor]:
        with torch.inference_mode(False), torch.enable_grad():  # who evaluates first trains with them later
            return self._run(torch.empty_like(inputs, device="meta"))

    def _run(self, inputs: Tensor) -> list[Tensor]:
        found = [inputs]
        for number, stage in enumerate(self._stages):
            try:
                output = stage(found[-1])
            except Exception as error:
                raise ParallelError(
                    f"what stage {number} returns must follow from the shape of what it takes (got "
                    f"{tuple(found[-1].shape)}, and: {error}); register its tensors as buffers or parameters, and let "
                    "no shape depend on values"
                ) from error
            if not isinstance(output, Tensor):
                raise ParallelError(
                    f"a stage must return one tensor (got {type(output).__name__} from stage {number}); let each layer "
                    "take and return one"
                )
            if number + 1 < len(self._stages):
                output = output.contiguous()  # as it is sent
            found.append(output.detach().requires_grad_(output.requires_grad))
        return found


def _of_torch(hooks: Mapping[int, Callable[..., Any]]) -> OrderedDict[int, Callable[..., Any]]:
    """Returns PyTorch's own of a module's ``hooks``: there are some that compute a weight.

    The user's would look at tensors that have no values. One that changes the shape or the type of what a stage returns
    is noticed where that is sent.
    """
    own = {n: hook for n, hook in hooks.items() if (getattr(hook, "__module__", None) or "").startswith("torch.")}
    return OrderedDict(own)

"""Methods of an offloaded model's modules that do something else there."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from stronghold.errors import OffloadedModelError

if TYPE_CHECKING:
    from stronghold.engine.block import Block
    from stronghold.engine.engine import Engine

_HOST = torch.device("cpu")


class _Method:
    """Stands for a method of ``module``; a copy of the module, in memory or in a file, gets its own back."""

    name: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __deepcopy__(self, memo: dict) -> Any:
        return getattr(memo.get(id(self._module())), self.name, None)

    def __reduce__(self) -> Any:
        return getattr, (self._module(), self.name)


class Apply(_Method):
    """Stands for ``nn.Module._apply``: ``.to(device)`` on an offloaded model changes nothing, or is refused.

    Trainers move their model to the device as a matter of course, and Lightning's to the host when a fit has ended: the
    layers are there already, and root and resident layers stay on the device for the next one, with a warning. Where
    parameters have the type that is asked for, buffers get it, as they do in any module.
    """

    name = "_apply"

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__(module)
        self._engine = weakref.ref(engine)

    def __call__(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module | None:
        engine, module = self._engine(), self._module()
        if engine is not None:
            engine.check_open()
            for dtype in sorted({dtype for unit in engine.units for dtype in unit.dtypes}, key=str):
                probe = torch.empty(0, dtype=dtype, device=engine.device.torch_device)
                result = function(probe)
                if probe.is_cpu and probe.is_shared():
                    raise OffloadedModelError(
                        "an offloaded model's weights stay in their memory (got share_memory()); give other processes "
                        "copies: {n: w.clone() for n, w in model.state_dict().items()}"
                    )
                if result.device not in (probe.device, _HOST) or result.dtype != probe.dtype:
                    raise OffloadedModelError(
                        f"an offloaded model stays on {probe.device} with dtype {probe.dtype} (got a move to "
                        f"{result.device}, {result.dtype}); build it anew and pass device= and dtype= to offload(), "
                        "leave bf16_full_eval and fp16_full_eval out of a Trainer's arguments, or have the model's "
                        "configuration tell a module that converts itself as it computes its dtype "
                        '(router_dtype="bfloat16" of a mixture of experts)'
                    )
            if result.device != probe.device:
                warnings.warn(
                    "an offloaded model stays where it is: nothing was copied to the host. For weights that nothing "
                    "changes later take {n: w.to('cpu', copy=True) for n, w in model.state_dict().items()}; for the "
                    "device's memory call stronghold.close(model)",
                    RuntimeWarning,
                    stacklevel=3,
                )
            if module is not None:
                _convert_buffers(module, function, engine.device.torch_device, recurse=recurse)
        return module


def _convert_buffers(
    module: nn.Module, function: Callable[[Tensor], Tensor], device: torch.device, *, recurse: bool
) -> None:
    """Gives buffers the type that ``function`` makes of theirs."""
    types: dict[torch.dtype, torch.dtype] = {}
    for owner in module.modules() if recurse else [module]:
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            dtype = buffer.dtype
            if dtype not in types:
                types[dtype] = function(torch.empty(0, dtype=dtype, device=device)).dtype
            if types[dtype] != dtype:
                owner._buffers[name] = buffer.to(types[dtype])


class Replicate(_Method):
    """Stands for ``nn.Module._replicate_for_data_parallel``, by which torch.nn.DataParallel copies a model: refused.

    That comes so far where all layers are resident: of others DataParallel itself refuses the parameters on the host.
    """

    name = "_replicate_for_data_parallel"

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        super().__init__(module)
        self._engine = weakref.ref(engine)

    def __call__(self) -> nn.Module:
        module, engine = self._module(), self._engine()
        if module is not None and (engine is None or engine.closed):  # another model may have it now
            return type(module)._replicate_for_data_parallel(module)
        raise OffloadedModelError(
            f"an offloaded model computes on one device of a process (got a replica of a "
            f"{type(module).__name__} for another one, as torch.nn.DataParallel makes them); set "
            "CUDA_VISIBLE_DEVICES=0, or train it by stronghold.replicate in one process per GPU, which torchrun starts"
        )


class Compile(_Method):
    """Stands for ``nn.Module.compile`` of a layer, which has the engine compile what is inside of it."""

    name = "compile"

    def __init__(self, module: nn.Module, block: Block) -> None:
        super().__init__(module)
        self._block = weakref.ref(block)

    def __call__(self, **arguments: Any) -> None:
        """Raises ValueError for what a layer cannot be compiled with."""
        if (block := self._block()) is not None:
            block.compile(**arguments)

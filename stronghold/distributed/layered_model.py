"""A model as a row of layers, which can be cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from stronghold.errors import ParallelError

Loss = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class LayeredModel(Protocol):
    """A model whose layers are computed one behind the other, each from the one before it alone."""

    @property
    def model(self) -> nn.Module:
        """The whole of it."""

    @property
    def layers(self) -> Sequence[nn.Module]:
        """What is cut between: no stage has less than one of them."""

    @property
    def container(self) -> str:
        """Where the layers are in a stage: the name of a ModuleList or Sequential, "" for the stage itself."""

    def stage(self, first: int, end: int) -> nn.Module:
        """Returns what computes ``layers[first:end]``, made of the model's own modules.

        It takes one tensor and returns one. What comes before the first layer is in the stage that has this one, and
        what follows the last layer in that one's.
        """

    @property
    def loss(self) -> Callable[[nn.Module, Tensor, Tensor], Tensor]:
        """Returns the mean loss of a micro-batch, a scalar, from the last stage, its output and the targets."""


def shared_by_ends(layered: LayeredModel) -> list[nn.Parameter]:
    """Returns what the stage of the first layer has and that of the last one, too: an embedding that is the head."""
    last = len(layered.layers) - 1
    if not last:
        return []
    first = {id(parameter) for parameter in layered.stage(0, 1).parameters()}
    return [parameter for parameter in layered.stage(last, last + 1).parameters() if id(parameter) in first]


class LayeredSequential:
    """An ``nn.Sequential``: a layer is a child with parameters and the children without any that follow it.

    Those before the first one with parameters belong to it. Raises ParallelError for any other module, and for one
    without parameters.
    """

    container = ""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        if not isinstance(model, nn.Sequential):
            raise ParallelError(
                f"stages are cut out of an nn.Sequential, whose children are its layers (got {type(model).__name__}); "
                "write the model as nn.Sequential(...) of its parts"
            )
        self.model = model
        self.loss = lambda stage, output, targets: loss(output, targets)  # which does not keep the model
        self._groups: list[list[nn.Module]] = []
        leading: list[nn.Module] = []
        for child in model:  # children() leaves out what is there a second time
            if any(True for _ in child.parameters()):
                self._groups.append([*leading, child])
                leading = []
            elif self._groups:
                self._groups[-1].append(child)
            else:
                leading.append(child)
        if not self._groups:
            raise ParallelError(
                f"stages need layers with parameters (got an nn.Sequential of {len(model)} children without any); pass "
                "a model that is trained"
            )
        self.layers = [nn.Sequential(*group) for group in self._groups]

    def stage(self, first: int, end: int) -> nn.Module:
        return nn.Sequential(*chain.from_iterable(self._groups[first:end]))

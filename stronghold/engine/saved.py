"""What autograd saves of a layer's run, and that nobody writes it before the backward pass has read it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stronghold.errors import OffloadedModelError


class Saved(NamedTuple):
    """A saved tensor and its version, which autograd does not compare where there are saved-tensor hooks.

    An operation's own output refers to the operation, which refers to what it saved: kept as it is, the graph of a
    forward pass that no backward pass follows would never go. Its detached twin shares memory and version.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Saved:
        kept = tensor if tensor.is_leaf else tensor.detach()
        return cls(kept, _version(kept))

    @classmethod
    def of_input(cls, tensor: Tensor) -> Saved:
        """Returns an input itself: the operation that it comes from does not refer to what the layer saved."""
        return cls(tensor, _version(tensor))

    def value(self, layer: str, more: str = "") -> Tensor:
        """Returns the tensor. Raises RuntimeError, as autograd does without hooks, where it has been written."""
        if (now := _version(self.tensor)) != self.version:
            raise RuntimeError(
                f"what autograd saved in {layer} must be the same in the backward pass (a tensor of shape "
                f"{tuple(self.tensor.shape)} was at version {self.version} and is at {now}: an in-place operation has "
                f"written it); use the operation that makes a new tensor, or clone() before it{more}"
            )
        return self.tensor


def stale_error(layer: str, more: str = "") -> OffloadedModelError:
    """Returns the error for a backward pass that comes to weights which are no longer those of the forward pass."""
    return OffloadedModelError(
        f"the weights of {layer} must be the same in the backward pass as in its forward pass (they have been "
        f"updated or written in between); call backward() before step(), or run the forward pass again{more}"
    )


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version

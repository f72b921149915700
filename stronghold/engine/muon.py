"""``stronghold.Muon``, with torch.optim.Muon's face, and AdamW for what is no matrix between hidden layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from stronghold.engine.adamw import AdamW
from stronghold.engine.engine import Engine
from stronghold.optim import HostMuon
from stronghold.optim.muon_groups import COEFFICIENTS, check_matrices
from stronghold.unit import ONE_PROCESS, unit_of


class Muon(AdamW, HostMuon):
    """Updates the matrices of an offloaded model by Muon, and the rest of it by AdamW.

    Muon is that of ``torch.optim.Muon`` (Jordan et al., 2024), operation for operation: the momentum of a matrix is
    made nearly orthogonal by five steps of Newton and Schulz's iteration in bf16, and the matrix moves in that
    direction. Matrices are never cut or flattened, neither in stages, which have whole layers, nor in replicas:
    those of a machine iterate some of a layer's matrices each. The momentum is kept in the store, 4 bytes per
    parameter, and the masters are exact, as AdamW's. Momentum and weights are updated on the host's cores; the
    direction, 2 bytes per parameter, goes to the device for the iteration and comes back, beside the computation.

    Each group is Muon's, unless it says ``use_muon=False``: then it is as one of :class:`stronghold.AdamW`, with the
    defaults of ``torch.optim.AdamW``. That is for embeddings, heads, norms and biases. What is said there of
    ``step()``, schedulers, clipping and ``update`` holds here too; no update needs more than its layer's gradients, so
    that ``"in_backward"`` serves Muon as well. The ``state_dict()`` of an optimizer all of whose groups are Muon's is
    that of ``torch.optim.Muon``, and each loads the other's.

    Args:
        params: Parameters of one offloaded model, or groups of them, as torch.optim takes them.
        lr: The learning rate of Muon's groups; a group may have its own, as of the next seven.
        weight_decay: The decay, times the learning rate, of each weight.
        momentum: The decay of the momentum.
        nesterov: Whether the direction is taken from the gradient moved on by the momentum, or from that alone.
        ns_coefficients: Three numbers, of the iteration's polynomial.
        eps: What a matrix's norm is at least, by which it is divided before the iteration.
        ns_steps: Steps of the iteration, below 100.
        adjust_lr_fn: How ``lr`` is adjusted to a matrix's shape: ``"original"``, as by None, or ``"match_rms_adamw"``
            for learning rates and decays that were found for AdamW.
        max_grad_norm: As of :class:`stronghold.AdamW`; so are the next three.
        update: ``"deferred"``, ``"in_backward"`` or ``"auto"``.
        nonfinite: ``"raise"`` or ``"skip"``.
        threads: The cores of the host's updates.

    Raises:
        ValueError: Settings out of range; a parameter of Muon's that is no matrix, or an embedding.
        OffloadedModelError: Parameters that are not all of one offloaded model.
        ParallelError: What another of the model's processes refuses.
        BudgetError: States that do not fit the model's budgets; MemoryError and StoreError as AdamW raises them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        max_grad_norm: float | None = None,
        update: str = "deferred",
        nonfinite: str = "raise",
        threads: int | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        kept = {"states": "fp32", "max_grad_norm": max_grad_norm, "nonfinite": nonfinite}
        groups = [{"params": params}] if isinstance(params, Tensor) else _as_groups(params)
        owner = next((owner for group in groups for owner in _owners(group)), None)
        if owner is not None and owner.processes is not ONE_PROCESS:  # one may see an embedding that another does not
            owner.processes.run_on_all(lambda: _check(groups))
        self._open(groups, defaults, update=update, threads=threads, **kept)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, Muon's unless it says ``use_muon=False``; its parameters must belong to the others' model.

        Raises ValueError for a parameter of Muon's that is no matrix, or an embedding.
        """
        (group,) = _as_groups([param_group])
        _check([group])
        super().add_param_group(group)


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Returns what torch.optim makes groups of as groups, each with a list of its parameters."""
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": [its] if isinstance(its := group["params"], Tensor) else list(its)} for group in groups]


def _tensors(group: dict[str, Any]) -> list[Any]:
    return [item[1] if isinstance(item, tuple) else item for item in group["params"]]


def _owners(group: dict[str, Any]) -> list[Engine]:
    """Returns whose a group's parameters are, in their order."""
    units = (unit_of(p) for p in _tensors(group) if isinstance(p, nn.Parameter))
    return [unit.owner for unit in units if unit is not None and unit.owner is not None]


def _check(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        owner = next(iter(_owners(group)), None)
        model = None if owner is None else owner.model()
        if group.get("use_muon", True):
            check_matrices([p for p in _tensors(group) if isinstance(p, Tensor)], model)

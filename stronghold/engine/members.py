"""The modules of an offloaded model as they were, to notice when some are added, removed or replaced."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from stronghold.errors import OffloadedModelError

_NAMED = 4
"""How many changes an error names."""


class Members:
    """The modules in a part of the model, by their qualified names, with the modules and parameters in each."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        # Weakly: a layer holds its block, which holds this.
        modules = list(modules)
        self._before = [
            (
                name,
                weakref.ref(module),
                {n: _Held(inner) for n, inner in module._modules.items()},
                module._parameters.copy(),
            )
            for name, module in modules
        ]
        self._ids = [(weakref.ref(m), _ids(m._modules), _ids(m._parameters)) for _, m in modules]

    def same(self) -> bool:
        """Whether each module still holds the same modules and parameters; one that is gone was in another."""
        for reference, inner, own in self._ids:  # a loop: it runs for every module in every forward pass
            if (module := reference()) is None:
                continue
            if [*map(id, module._modules.values())] != inner or [*map(id, module._parameters.values())] != own:
                return False
        return True

    def put_back(self) -> None:
        """Makes each module hold the parameters again that it held, in the place of others."""
        for _, reference, _, parameters in self._before:
            if (module := reference()) is not None:
                kept = {name: parameter for name, parameter in parameters.items() if name in module._parameters}
                module._parameters.update(kept)

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields what was added, removed or replaced: its qualified name, what was there, and what is."""
        for prefix, reference, references, parameters in self._before:
            if (module := reference()) is None:
                continue
            modules = {name: held.module() for name, held in references.items()}
            for before, now in ((modules, module._modules), (parameters, module._parameters)):
                for name in [*now, *(name for name in before if name not in now)]:
                    then, there = before.get(name), now.get(name)
                    if then is not there:
                        yield (f"{prefix}.{name}" if prefix else name), then, there


def refuse_changes(parts: Iterable[Members]) -> None:
    """Raises OffloadedModelError, which names the first changes in ``parts``, counts the others and has the remedy."""
    changes = [change for part in parts for change in part.changes()]
    told = "; ".join(f"{name} {_change(then, there)}" for name, then, there in changes[:_NAMED])
    more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
    raise OffloadedModelError(
        "an offloaded model must keep the parameters that it had at offload(): what is added is taken in, where one "
        f"process trains the model, but nothing may go or be replaced (got: {told}{more}). {_remedy(changes)}"
    )


def _remedy(changes: Iterable[tuple[str, Any, Any]]) -> str:
    """Returns what to do instead of ``changes``: of several kinds, instead of the first that is no addition."""
    then, there = next(((then, there) for _, then, there in changes if then is not None), (None, None))
    if then is None:
        return (
            "Change it first (peft.get_peft_model, then offload), or have the trainer change it (peft_config=...), "
            "then offload(trainer.model) and set trainer.optimizer"
        )
    if there is None:
        return (
            "Change it first, then offload; an adapter that is not needed any more may stay, with another one made "
            "active by PEFT's set_adapter() instead of delete_adapter()"
        )
    if isinstance(then, nn.Parameter):
        return (
            "Write into the parameters (p.data.copy_(...), or load_state_dict() without assign=True). PEFT's "
            "load_adapter(), by which Trainer resumes, makes fp32 adapters in the place of bf16 ones: give Trainer "
            "optimizers=(stronghold.AdamW(...), None) and callbacks=[stronghold.trainer.KeepEverything()], or keep the "
            "adapters in fp32, as PEFT makes them"
        )
    return "Change it first, then offload; adapters are merged by merge_adapter() instead of merge_and_unload()"


def check_held(name: str, owners: Iterable[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Raises where one of the modules that use a parameter of the unit ``name`` no longer holds it by its own name."""
    for module, own, parameter in owners:
        if module._parameters.get(own) is not parameter:
            raise OffloadedModelError(
                f"parameter {own!r} of {name} ({type(module).__name__}) was replaced after offload(), as by "
                "torch.func.functional_call or load_state_dict(assign=True), so the engine would compute with the old "
                "one; write into the parameter (p.data.copy_(...)), or replace it before calling offload()"
            )


class _Gone:
    """Stands for a module that nobody holds any more."""


class _Held:
    """A module's child, or None, held weakly."""

    def __init__(self, module: nn.Module | None) -> None:
        self._reference = None if module is None else weakref.ref(module)

    def module(self) -> nn.Module | _Gone | None:
        if self._reference is None:
            return None
        found = self._reference()
        return _Gone() if found is None else found


def _change(then: Any, now: Any) -> str:
    if then is None:
        return f"({_kind(now)}) was added"
    if now is None:
        return "was removed"
    if isinstance(then, nn.Parameter) and isinstance(now, nn.Parameter):
        return "is another parameter"
    was = "was another module" if isinstance(then, _Gone) else f"was {_kind(then)}"
    return f"{was} and is {_kind(now)}"


def _kind(value: Any) -> str:
    if isinstance(value, nn.Parameter):
        return "a parameter"
    kind = type(value)
    return kind.__name__ if kind.__module__.startswith("torch.nn.") else f"{kind.__module__}.{kind.__name__}"


def _ids(values: Mapping[str, object]) -> list[int]:
    """Returns the ids of ``values``, and None's for a parameter on the meta device: with values it is another."""
    return [id(None if isinstance(value, nn.Parameter) and value.is_meta else value) for value in values.values()]

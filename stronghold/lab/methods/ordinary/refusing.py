"""What a method that is there to be compared with does not take."""

from torch import nn

from stronghold.lab.models.gpt import GPT
from stronghold.lab.settings import TrainSettings

STRONGHOLDS_OWN = {
    "store": "ram",
    "resident": 0,
    "micro_batch": None,
    "device_memory": None,
    "host_memory": None,
    "compile": False,
    "states": "fp32",
    "update": "deferred",
    "nonfinite": "raise",
    "save": None,
    "checkpoint_every": None,
    "resume": False,
}
"""Settings and the values at which they ask for nothing. ``window`` is not among them: others have none."""


def reference_model(
    model: nn.Module,
    settings: TrainSettings,
    method: str,
    *,
    activations: tuple[str, ...] = ("recompute",),
    keeps: tuple[str, ...] = (),
) -> GPT:
    """Returns ``model``, a reference GPT.

    ``activations`` are the ways to have them that this method has, ``keeps`` the settings of stronghold that it knows.

    Raises ValueError for another model, and for a setting that the method would have to ignore.
    """
    if not isinstance(model, GPT):
        raise ValueError(
            f"{method} trains the reference GPT, on which methods are compared (got a {type(model).__name__}); leave "
            "out the model's path, or train with stronghold"
        )
    if settings.offload.activations not in activations:
        raise ValueError(
            f"{method} must have its activations by {' or '.join(map(repr, activations))} (got "
            f"{settings.offload.activations!r}); pass that, or train with stronghold"
        )
    wanted = settings.flat()
    for name, nothing in STRONGHOLDS_OWN.items():
        if name not in keeps and wanted[name] != nothing:
            alone = "" if nothing in (None, False) else f", it has only {nothing!r}"
            raise ValueError(
                f"{method} cannot keep {name} (got {wanted[name]!r}{alone}); leave it out, or train with stronghold"
            )
    return model

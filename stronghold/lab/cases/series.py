"""The methods as figures and tables show them: one name and one colour each, the same everywhere."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Series:
    """A method's name in print, its colour, and its marker where it is drawn as a line."""

    label: str
    colour: str
    marker: str


# Okabe and Ito's palette, told apart by people of every colour vision.
SERIES = {
    "megatron-lm": Series(label="Megatron-LM", colour="#666666", marker="s"),
    "megatron-lm-exact": Series(label="Megatron-LM, exact norms", colour="#999999", marker="x"),
    "l2l": Series(label="L2L", colour="#E69F00", marker="v"),
    "zero-offload": Series(label="ZeRO-Offload", colour="#009E73", marker="^"),
    "zero-infinity": Series(label="ZeRO-Infinity", colour="#56B4E9", marker="D"),
    "zero-infinity-nvme": Series(label="ZeRO-Infinity (NVMe)", colour="#CC79A7", marker="d"),
    "fsdp-offload": Series(label="FSDP2 offload", colour="#D55E00", marker="P"),
    "torchao-offload": Series(label="torchao offload", colour="#F0E442", marker="X"),
    "stronghold": Series(label="STRONGHOLD", colour="#0072B2", marker="o"),
}


def check_method(name: object) -> str:
    """Returns a method's name. Raises ValueError for one that is unknown."""
    if not isinstance(name, str) or name not in SERIES:
        raise ValueError(f"a method must be one of {', '.join(SERIES)} (got {name!r}); correct its name")
    return name

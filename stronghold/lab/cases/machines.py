"""The settings that the cases are run in: the paper's machine, a newer one under its limits, and smaller ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stronghold.units import parse_bytes

PAPER_METHODS = ("megatron-lm", "l2l", "zero-offload", "zero-infinity", "stronghold")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model's shape and course, the methods to compare, and what the cases vary.

    ``largest`` has the layers of each method's largest model where case 1 has not found them; it has "megatron-lm",
    whose largest model is that of cases 3 and 5. ``window`` is stronghold's in cases 2 to 4, ``smallest_window`` in
    case 1. Every run on a GPU may take ``device_limit`` bytes of it, and a trial of case 1 ``host_limit`` of the host's
    memory; its search begins with ``first`` layers, ends with ``most``, and is exact to ``grain``.
    """

    name: str
    about: str
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int
    dtype: str
    steps: int
    lr: float
    methods: tuple[str, ...]
    largest: Mapping[str, int]
    window: int
    smallest_window: int
    scaling_layers: tuple[int, ...]
    windows: tuple[int, ...]
    device_limit: int
    host_limit: int
    first: int
    most: int
    grain: int = 1

    @property
    def shape(self) -> dict[str, object]:
        """What every run of a case has in common, by the names that records have for it."""
        names = ("hidden", "heads", "vocabulary", "sequence", "batch", "dtype")
        return {name: getattr(self, name) for name in names}


V100 = Machine(
    name="v100",
    about="the paper's: one V100 with 32 GB, 90 GB of host memory, 12 cores; about five hours there",
    hidden=2048,
    heads=16,
    vocabulary=51200,
    sequence=1024,
    batch=4,
    dtype="fp32",
    steps=50,
    lr=1.5e-4,
    methods=PAPER_METHODS,
    largest={"megatron-lm": 32, "l2l": 78, "zero-offload": 48, "zero-infinity": 48, "stronghold": 100},
    window=15,
    smallest_window=4,
    scaling_layers=(16, 24, 32, 40, 48, 56, 64, 78, 92),
    windows=(2, 4, 6, 8, 10, 12, 14, 15),
    device_limit=parse_bytes("32GiB"),
    host_limit=parse_bytes("90GB"),
    first=16,
    most=256,
)

H200 = replace(
    V100,
    name="h200",
    about="one H200 under the limits of the paper's machine, in bf16",
    dtype="bf16",
    steps=20,
    lr=1e-5,
    methods=("megatron-lm", "l2l", "zero-offload", "zero-infinity", "fsdp-offload", "stronghold"),
    largest={"megatron-lm": 32},
    first=64,
    grain=4,
)

CPU = Machine(
    name="cpu",
    about="scaled: two cores and 4 GiB are enough, without a GPU; some minutes a case",
    hidden=256,
    heads=4,
    vocabulary=2048,
    sequence=64,
    batch=4,
    dtype="fp32",
    steps=20,
    lr=6e-4,
    methods=(
        "megatron-lm",
        "l2l",
        "zero-offload",
        "zero-infinity",
        "zero-infinity-nvme",
        "fsdp-offload",
        "stronghold",
    ),
    largest={"megatron-lm": 16, "l2l": 32, "zero-offload": 32, "zero-infinity": 32, "stronghold": 64},
    window=4,
    smallest_window=2,
    scaling_layers=(8, 16, 24, 32, 48),
    windows=(1, 2, 4, 8, 12, 16),
    device_limit=parse_bytes("256MiB"),
    host_limit=parse_bytes("1GiB"),
    first=8,
    most=96,
)

TINY = Machine(
    name="tiny",
    about="to see that it works: all five cases in under a minute on two cores; its numbers say nothing",
    hidden=64,
    heads=2,
    vocabulary=512,
    sequence=32,
    batch=2,
    dtype="fp32",
    steps=5,
    lr=1e-3,
    methods=("megatron-lm", "stronghold"),
    largest={"megatron-lm": 2, "stronghold": 2},
    window=1,
    smallest_window=1,
    scaling_layers=(2, 3),
    windows=(1, 2),
    device_limit=parse_bytes("64MiB"),
    host_limit=parse_bytes("2GiB"),
    first=2,
    most=2,
)

MACHINES = {machine.name: machine for machine in (V100, H200, CPU, TINY)}


def find_machine(name: str) -> Machine:
    """Returns the preset called ``name``. Raises ValueError for any other name."""
    if name not in MACHINES:
        raise ValueError(f"a machine must be one of {', '.join(MACHINES)} (got {name!r}); pass one of them")
    return MACHINES[name]

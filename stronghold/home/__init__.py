"""Where one unit of parameters lives on the host, and how its parameters behave there."""

from stronghold.home.home import Home, Owner, Updater, is_shared
from stronghold.home.parameter import (
    BoundParameter,
    ConsumedGradient,
    OffloadedParameter,
    PendingGradient,
    consumed_error,
    consumed_like,
    home_of,
)

__all__ = [
    "BoundParameter",
    "ConsumedGradient",
    "Home",
    "OffloadedParameter",
    "Owner",
    "PendingGradient",
    "Updater",
    "consumed_error",
    "consumed_like",
    "home_of",
    "is_shared",
]

"""Where one unit of parameters lives, and how its parameters and gradients behave there."""

from stronghold.home.gradient import (
    Collected,
    ConsumedGradient,
    Known,
    OffloadedGradient,
    consumed_error,
    consumed_like,
    known_of,
    latest,
    note_gradient,
)
from stronghold.home.home import Home, is_shared
from stronghold.home.parameter import BoundParameter, OffloadedParameter, gradient_of, home_of, set_gradient
from stronghold.home.protocols import Kind, Memory, Owner, Updater, Work
from stronghold.home.replicas import ONE_REPLICA, Lane, Replicas

__all__ = [
    "ONE_REPLICA",
    "BoundParameter",
    "Collected",
    "ConsumedGradient",
    "Home",
    "Kind",
    "Known",
    "Lane",
    "Memory",
    "OffloadedGradient",
    "OffloadedParameter",
    "Owner",
    "Replicas",
    "Updater",
    "Work",
    "consumed_error",
    "consumed_like",
    "gradient_of",
    "home_of",
    "is_shared",
    "known_of",
    "latest",
    "note_gradient",
    "set_gradient",
]

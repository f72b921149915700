"""Where one unit of parameters lives, and how its parameters and gradients behave there."""

from stronghold.home.closed import close_parameter, closed_error
from stronghold.home.compiler import opaque
from stronghold.home.consumed import Consumed, ConsumedGradient, consumed_error, consumed_like
from stronghold.home.dtypes import check_mixed
from stronghold.home.gradient import Collected, Known, OffloadedGradient, known_of, latest, make_plain, note_gradient
from stronghold.home.home import Home, has_company, is_shared
from stronghold.home.parameter import BoundParameter, OffloadedParameter, gradient_of, home_of, set_gradient
from stronghold.home.protocols import Kind, Memory, Owner, Prepared, Updater, Work
from stronghold.home.replicas import ONE_REPLICA, Lane, Replicas

__all__ = [
    "ONE_REPLICA",
    "BoundParameter",
    "Collected",
    "Consumed",
    "ConsumedGradient",
    "Home",
    "Kind",
    "Known",
    "Lane",
    "Memory",
    "OffloadedGradient",
    "OffloadedParameter",
    "Owner",
    "Prepared",
    "Replicas",
    "Updater",
    "Work",
    "check_mixed",
    "close_parameter",
    "closed_error",
    "consumed_error",
    "consumed_like",
    "gradient_of",
    "has_company",
    "home_of",
    "is_shared",
    "known_of",
    "latest",
    "make_plain",
    "note_gradient",
    "opaque",
    "set_gradient",
]

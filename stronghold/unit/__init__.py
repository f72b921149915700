"""Where one unit of parameters lives, and how its parameters and gradients behave there."""

from stronghold.unit.attributes import same_octets
from stronghold.unit.becoming import become
from stronghold.unit.calls import check_not_traced, check_not_transformed
from stronghold.unit.closed import close_parameter, closed_error
from stronghold.unit.compiler import as_written, opaque
from stronghold.unit.computed_with import digest
from stronghold.unit.consumed import Consumed, ConsumedGradient, StandIns, consumed_error
from stronghold.unit.copies import wait_for_copies
from stronghold.unit.dtypes import check_mixed
from stronghold.unit.gradient import (
    GradMeta,
    HostGrad,
    OffloadedGradient,
    grad_meta_of,
    gradient_name,
    latest,
    make_ours,
    make_plain,
    note_gradient,
    note_squares,
)
from stronghold.unit.moving import keep_on_device, may_move
from stronghold.unit.own_writes import data_of, own_write_error, set_data
from stronghold.unit.packed import (
    all_parameters,
    check_packed,
    count_of,
    is_packed,
    pack,
    parameters_and_owners,
    parts_of,
    settle,
    stand_in,
    unpacked,
)
from stronghold.unit.parameter import (
    BoundParameter,
    OffloadedParameter,
    bound,
    check_not_swapped,
    gradient_of,
    index_of,
    present_gradients,
    set_gradient,
    take_gradient,
    unit_of,
)
from stronghold.unit.process_group import ONE_PROCESS, OneProcess, ProcessGroup, from_rank0, sum_over
from stronghold.unit.quantised import part_of
from stronghold.unit.replicas import ONE_REPLICA, Lane, Replicas
from stronghold.unit.room import Need, check_room, missing_remainders
from stronghold.unit.unit import Unit
from stronghold.unit.unit_memory import Kind, Memory
from stronghold.unit.users import check_unmoved, has_company

__all__ = [
    "ONE_PROCESS",
    "ONE_REPLICA",
    "BoundParameter",
    "Consumed",
    "ConsumedGradient",
    "GradMeta",
    "HostGrad",
    "Kind",
    "Lane",
    "Memory",
    "Need",
    "OffloadedGradient",
    "OffloadedParameter",
    "OneProcess",
    "ProcessGroup",
    "Replicas",
    "StandIns",
    "Unit",
    "all_parameters",
    "as_written",
    "become",
    "bound",
    "check_mixed",
    "check_not_swapped",
    "check_not_traced",
    "check_not_transformed",
    "check_packed",
    "check_room",
    "check_unmoved",
    "close_parameter",
    "closed_error",
    "consumed_error",
    "count_of",
    "data_of",
    "digest",
    "from_rank0",
    "grad_meta_of",
    "gradient_name",
    "gradient_of",
    "has_company",
    "index_of",
    "is_packed",
    "keep_on_device",
    "latest",
    "make_ours",
    "make_plain",
    "may_move",
    "missing_remainders",
    "note_gradient",
    "note_squares",
    "opaque",
    "own_write_error",
    "pack",
    "parameters_and_owners",
    "part_of",
    "parts_of",
    "present_gradients",
    "same_octets",
    "set_data",
    "set_gradient",
    "settle",
    "stand_in",
    "sum_over",
    "take_gradient",
    "unit_of",
    "unpacked",
    "wait_for_copies",
]

"""Machines of cards by their makers' numbers: found by name, and as a file of a measured one."""

from __future__ import annotations

import pytest

from stronghold.planner.cards import CARDS, GIB, card_named, machine_of_card
from stronghold.planner.machine_file import MachineFile
from stronghold.planner.machine_rates import machine_of, op_rates
from stronghold.planner.op_costs import Op


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("4090", "RTX 4090"),
        ("rtx-4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("A100", "A100 80GB"),
        ("A100-80GB", "A100 80GB"),
        ("h200", "H200 SXM"),
        ("H100SXM", "H100 SXM"),
    ],
)
def test_a_name_may_be_a_part_of_it(name: str, found: str) -> None:
    assert card_named(name).name == found


@pytest.mark.parametrize("name", ["", " ", "RTX", "SXM", "GTX 1080", "A10", "H20", "GB", "3"])
def test_a_name_of_none_or_several_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"one of RTX 3090, .*, H200 SXM \(got '.*'\); pass one"):
        card_named(name)


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_its_file_reads_as_one_that_was_measured(card: object) -> None:
    machine = machine_of_card(card, 64 * GIB, ["/mnt/a", "/mnt/b"])  # type: ignore[arg-type]
    assert [*machine.disks] == ["/mnt/a", "/mnt/b"]
    assert MachineFile.from_json(machine.to_json()) == machine
    assert machine.host_memory_bytes == 64 * GIB and "maker's numbers" in machine.device_name


def test_what_it_takes_is_bytes_and_operations_by_the_maker_s_rates() -> None:
    card = card_named("4090")
    machine = machine_of_card(card, 64 * GIB)
    for dtype, states, moved in (("float32", "fp32", 28), ("bfloat16", "fp32", 26), ("bfloat16", "8bit", 14)):
        rates = machine_of(machine, dtype=dtype, states=states)
        assert rates.host_update_ns == pytest.approx(moved / 80)
        assert rates.h2d_bytes_per_s == rates.d2h_bytes_per_s == 25e9
    product = Op("matmul", "bfloat16", (1, 4096, 4096, 4096), 2 * 4096**3, 3 * 2 * 4096**2)
    likely, slow = (op_rates(machine, pace).seconds({product: 1}) for pace in ("likely", "slow"))
    assert likely == pytest.approx(product.flops / (0.9 * 165.2e12), rel=1e-3)
    assert slow == pytest.approx(likely / 0.75, rel=1e-3)

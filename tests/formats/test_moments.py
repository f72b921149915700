"""Which values of a moment can have come from an update."""

import math

import pytest
import torch

from stronghold.formats import moments
from stronghold.formats.moments import moment_in, wrong_moment

HUGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("moment", "value", "rule"),
    [
        ("exp_avg", -3.0, None),
        ("exp_avg", math.nan, "must be finite (got nan)"),
        ("exp_avg", math.inf, "must be finite (got inf)"),
        ("exp_avg", -math.inf, "must be finite (got -inf)"),
        ("exp_avg_sq", 0.0, None),
        ("exp_avg_sq", -0.0, None),
        ("exp_avg_sq", math.inf, None),
        ("exp_avg_sq", math.nan, "must be zero or more (got nan)"),
        ("exp_avg_sq", -1e-3, "must be zero or more (got -0.001"),
        ("exp_avg_sq", -math.inf, "must be zero or more (got -inf)"),
    ],
)
def test_values_are_told_apart_wherever_they_are(moment, value, rule, dtype, monkeypatch):
    monkeypatch.setattr(moments, "_PART", 4)
    for place in (0, 3, 4, 9):
        values = torch.arange(10, dtype=dtype)
        values[place] = value
        found = wrong_moment(values.view(2, 5), moment)
        assert (found is None) if rule is None else found.startswith(rule[:30]), (place, found)
    assert wrong_moment(torch.zeros(0, dtype=dtype), moment) is None


def test_a_limit_holds_for_what_has_one():
    for moment in ("exp_avg", "exp_avg_sq"):
        assert wrong_moment(torch.tensor([HUGE]), moment) is None
        assert wrong_moment(torch.tensor([2.0]), moment, largest=2.0) is None
        assert "at most 2, for eight bits" in str(wrong_moment(torch.tensor([2.5]), moment, largest=2.0))
        assert wrong_moment(torch.tensor([math.inf]), moment, largest=2.0)


def test_every_exponent_up_to_the_last_one_is_of_numbers():
    from stronghold.native import Blocks
    from stronghold.optim.blocks import decode

    codes = torch.arange(64, dtype=torch.uint8) * 4
    for exponent in range(256):
        exponents = torch.tensor([exponent], dtype=torch.uint8)
        wrong = wrong_moment(exponents, "exp_avg_sq")
        values = decode(Blocks(codes=codes, exponents=exponents), signed=False)
        assert (wrong is not None) == (exponent > 246), exponent
        assert wrong is not None or bool(torch.isfinite(values).all())


def test_names_tell_moments_from_parameters():
    parameters = {"a", "b/exp_avg", "b"}
    assert moment_in("a/exp_avg", parameters) == "exp_avg"
    assert moment_in("a/exp_avg_sq/exponents", parameters) == "exp_avg_sq"
    for name in ("a", "a/remainder", "b/exp_avg", "c/exp_avg", "exp_avg"):
        assert moment_in(name, parameters) is None, name

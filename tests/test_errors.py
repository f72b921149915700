import pytest

from stronghold.errors import BudgetError, NonFiniteGradientError, OffloadedModelError, StrongholdError


@pytest.mark.parametrize("kind", [BudgetError, NonFiniteGradientError, OffloadedModelError])
def test_one_base_catches_them_all(kind):
    with pytest.raises(StrongholdError, match="why"):
        raise kind("why")


def test_a_budget_is_also_a_bad_value():
    with pytest.raises(ValueError, match="why"):
        raise BudgetError("why")

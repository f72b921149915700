"""Values to JSON and back: equal, of the same types, to the bit."""

import json
import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stronghold.checkpoint.plain import from_plain, to_plain

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner), max_leaves=12
)


def there_and_back(value):
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


def types(value):
    if isinstance(value, dict):
        return [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value), *map(types, value)]
    return type(value), math.copysign(1, value) if isinstance(value, float) else None


@given(VALUES)
def test_values_come_back(value):
    found = there_and_back(value)
    assert found == value
    assert types(found) == types(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.1, dtype=torch.float64),
        torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16),
        torch.randint(255, (7, 2), dtype=torch.uint8),
        torch.zeros(0, 3, dtype=torch.int16),
        torch.arange(6).view(2, 3).t(),
        torch.get_rng_state(),
    ],
)
def test_tensors_come_back(value):
    found = there_and_back([value])[0]
    assert found.dtype is value.dtype
    assert found.shape == value.shape
    torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


def test_generators_and_what_schedulers_hold_come_back():
    kind, keys, *rest = there_and_back(np.random.get_state())
    expected = np.random.get_state()
    assert (kind, *rest) == (expected[0], *expected[2:])
    assert keys.dtype == expected[1].dtype
    assert (keys == expected[1]).all()
    assert there_and_back(random.getstate()) == random.getstate()
    for counted in (Counter({3: 1, 5: 2}), Counter({"one": 1}), Counter()):
        counter = there_and_back(counted)
        assert (type(counter), counter) == (Counter, counted)
    assert math.isnan(there_and_back(float("nan")))
    assert there_and_back([float("-inf"), np.float64(0.1), np.int64(3)]) == [float("-inf"), 0.1, 3]
    assert there_and_back({"$tuple": [1]}) == {"$tuple": [1]}


def test_what_cannot_be_kept_is_named_with_its_place():
    with pytest.raises(ValueError, match=r"got a function at extra\.a\[1\]"):
        to_plain({"a": [1, test_values_come_back]}, "extra")

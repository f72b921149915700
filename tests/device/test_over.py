"""A tensor over another one's memory that is no user of its storage."""

import torch

from stronghold.device import over


def users_of(tensor):
    """Counted in a function of its own: pytest keeps the parts of what it asserts, and torch 2.9 counts these."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def test_it_is_the_same_memory_and_no_user_of_it():
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    users = users_of(tensor)
    twin = over(tensor)
    assert twin.shape == (6,) and twin.dtype == tensor.dtype
    twin[4] = 7.0
    assert tensor[1, 1] == 7.0
    assert users_of(tensor) == users

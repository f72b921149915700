"""A tensor over another one's memory that is no user of its storage."""

import torch

from stronghold.device import over


def test_it_is_the_same_memory_and_no_user_of_it():
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    users = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    twin = over(tensor)
    assert twin.shape == (6,) and twin.dtype == tensor.dtype
    twin[4] = 7.0
    assert tensor[1, 1] == 7.0
    assert torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == users

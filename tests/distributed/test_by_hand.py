"""Gradients that processes add up by hand, each with a model of its own, against plain PyTorch."""

from __future__ import annotations

from tests.distributed.launched import launch


def test_gradients_that_a_collective_has_written_are_clipped_by_their_own_norm(tmp_path):
    """What was known of a gradient as it left the device is no longer so; no call of the tensor's own tells of it."""
    for found in launch("tests.distributed.by_hand", "averaged", 2, tmp_path):
        assert len(found) == 12
        for name, (same, apart) in found.items():
            assert same, name
            assert apart < (1e-6 if "float32" in name else 2e-2), (name, apart)

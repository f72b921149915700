"""Loss scaling by torch.amp.GradScaler, of gradients on the host.

GradScaler keeps its numbers on the device and copies them to each gradient's device without waiting. On the host it
would unscale by whatever was in that memory before, and miss infinite gradients. Here the copy to the host blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import _MultiDeviceReplicator

_own_get = _MultiDeviceReplicator.get


def _get(self: _MultiDeviceReplicator, device: torch.device) -> Tensor:
    copies, to_host = self._per_device_tensors, torch.device(device).type == "cpu"
    if to_host and device not in copies and self.master.device.type != "cpu":
        copies[device] = self.master.to(device=device, copy=True)
    return _own_get(self, device)


_MultiDeviceReplicator.get = _get  # type: ignore[method-assign]

"""Loss scaling by torch.amp.GradScaler: gradients on the host are scaled by numbers that are there.

The scaler's are on the device, and it has them copied to wherever gradients are without waiting for the copy. Then the
host would unscale gradients by whatever was in that memory, and not see those that are not finite.
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

"""Everything that a run needs to go on to the bit, on disk: safetensors with checksums, no pickle.

A checkpoint is a directory. ``layer-00000.safetensors`` and so on hold the layers, ``root-00000.safetensors`` the root
parameters (earlier versions: ``edge-``), ``buffers.safetensors`` the buffers
(:func:`stronghold.checkpoint.unit_tensors.tensors_of` has the names in them), and ``manifest.json`` the rest: the
format's number, for each file its length and the CRC-32C of its header and of each tensor, each parameter's shape, file
and step, the optimizer's groups, the scheduler's and the random states, and ``extra``. In the directory of a store on
disk the units' own files are a part of it, each tensor at its byte. The last line of the manifest is the CRC-32C of
what stands before it.
"""

from stronghold.checkpoint.folder import newest
from stronghold.checkpoint.loading import load
from stronghold.checkpoint.saving import save

__all__ = ["load", "newest", "save"]

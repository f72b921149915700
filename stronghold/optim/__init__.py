"""The host's optimizer: its states, and what a step updates."""

from stronghold.optim.groups import as_float, settings_in_common, settings_now
from stronghold.optim.host_adamw import HostAdamW
from stronghold.optim.host_muon import HostMuon
from stronghold.optim.threads import Threads
from stronghold.optim.update import Update, gradients_of, updates_of

__all__ = [
    "HostAdamW",
    "HostMuon",
    "Threads",
    "Update",
    "as_float",
    "gradients_of",
    "settings_in_common",
    "settings_now",
    "updates_of",
]

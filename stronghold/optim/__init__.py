"""The host's optimizer: its states, and what a step updates."""

from stronghold.optim.host_adamw import HostAdamW
from stronghold.optim.threads import Threads
from stronghold.optim.update import Update, gradients_of, updates_of

__all__ = ["HostAdamW", "Threads", "Update", "gradients_of", "updates_of"]

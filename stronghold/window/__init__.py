"""The window: layers in slots, gradients and inputs on their way, and every wait between them."""

from stronghold.window.activations import HostActivations
from stronghold.window.gradients import RING, Gradients
from stronghold.window.traffic import Traffic
from stronghold.window.waits import Wait, Waits
from stronghold.window.window import Window

__all__ = ["RING", "Gradients", "HostActivations", "Traffic", "Wait", "Waits", "Window"]

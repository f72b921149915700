"""The window: layers in slots, gradients and inputs on their way."""

from stronghold.window.activations import SLOTS as INPUT_SLOTS
from stronghold.window.activations import Activations, KeptInput, activations_of, input_sizes
from stronghold.window.device_gradients import DeviceGradients
from stronghold.window.grad_offload import RING
from stronghold.window.gradients import Gradients, gradient_slot_bytes
from stronghold.window.parts import Accumulators, OfSums, Parts, accumulators_of
from stronghold.window.sums import add_scratch_bytes
from stronghold.window.traffic import Traffic
from stronghold.window.window import Window

__all__ = [
    "INPUT_SLOTS",
    "RING",
    "Accumulators",
    "Activations",
    "DeviceGradients",
    "Gradients",
    "KeptInput",
    "OfSums",
    "Parts",
    "Traffic",
    "Window",
    "accumulators_of",
    "activations_of",
    "add_scratch_bytes",
    "gradient_slot_bytes",
    "input_sizes",
]

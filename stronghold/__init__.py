"""Trains models larger than the device's memory: a window of layers on the device, the rest in RAM."""

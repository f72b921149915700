"""An accelerator in software, for tests: PyTorch takes it for a device, and it reports every missing wait.

See README.md in this folder.
"""

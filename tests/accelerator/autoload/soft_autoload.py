"""What PyTorch calls at its import where this folder is in PYTHONPATH: every process then has the device ``"soft"``."""


def load() -> None:
    """Makes the device known to PyTorch, and to the engine with pinned memory, as CUDA's driver gives it."""
    import tests.accelerator.host  # noqa: F401

"""The version, as pyproject.toml has it: here, below the public face, every room may know it."""

__version__ = "0.1.0"

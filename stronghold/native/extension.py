"""The compiled extension, or an error that says how to build it."""

try:
    from stronghold import _C
except ImportError as error:
    raise ImportError(
        f"stronghold's compiled kernels (stronghold._C) cannot be imported ({error}); build them with "
        "`pip install .`, or `pip install -e .` to run from the source tree, in the project's root with g++ "
        "installed, under the Python that imports them"
    ) from error

__all__ = ["_C"]

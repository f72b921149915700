"""The exceptions that stronghold raises on its own account."""


class StrongholdError(RuntimeError):
    """The base of all of them: catch it to catch whatever stronghold refuses or reports."""


class BudgetError(StrongholdError, ValueError):
    """A memory budget cannot hold what was asked for.

    Raised before training starts and before any state has changed; the message has the bytes needed, the
    bytes given and what would fit.
    """


class NonFiniteGradientError(StrongholdError):
    """A gradient holds NaN or infinity, and the user chose to be told rather than to have the step skipped.

    Raised before any parameter or optimizer state of that step has changed.
    """


class OffloadedModelError(StrongholdError):
    """An offloaded model, or an optimizer over one, is used in a way that its placement forbids.

    Raised, for example, when a parameter was added or replaced after ``offload``, when an optimizer was built
    on another model's parameters, or on a second ``backward()`` under ``update="in_backward"``.
    """

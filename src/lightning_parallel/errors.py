"""Errors for input that cannot keep the promise of equality with one device."""


class ParallelConfigError(ValueError):
    """Sizes, options or inputs that do not fit together.

    The message says what was seen, the rule it breaks, and the nearest choice that works. It is raised on
    every rank before any collective, so no rank is left waiting.
    """


class PlanError(ParallelConfigError):
    """A plan that does not fit the module: an unmatched glob, an unknown role, a size that does not divide."""

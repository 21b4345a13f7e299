"""Exponential backoff."""

from math import inf

_MAX_DOUBLINGS = 32  # keeps the product within a float after any number of failures


def backoff(failures: int, first: float, longest: float = inf) -> float:
    """Return the seconds to wait after `failures` consecutive failures: `first`, doubling up to `longest`; 0 after none."""
    return min(longest, first * 2 ** min(failures - 1, _MAX_DOUBLINGS)) if failures > 0 else 0.0

"""Garbage collection in a worker, outside of the time in which clients wait for tokens.

A collection stops all threads while it visits objects, and a version of many tensors has many objects: with 18,867 tensors,
each collection took a quarter of a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MORE = 1_000_000  # objects, some 100 MB
_frozen = 0  # objects frozen by the last `collect_and_freeze`
_made = 0  # upper bound on the objects frozen since then by `gc_paused`


def collect_and_freeze() -> None:
    """Run a full collection, then freeze all survivors.

    For moments without requests: at boot and before sleep at level 2.
    """
    global _frozen, _made
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _frozen, _made = gc.get_freeze_count(), 0


@contextmanager
def gc_paused(*, collect: bool = True) -> Iterator[None]:
    """Disable collections inside the block, and freeze the objects that it leaves.

    Objects created inside are freed by reference count alone. Their cycles remain until the next `collect_and_freeze`, which runs
    here once a million objects were added since the last one, unless `collect` is False.
    """
    global _made
    was_enabled = gc.isenabled()
    if collect and _made > _MORE:  # rarely: counting stops all threads for a tenth of a second
        _made = gc.get_freeze_count() - _frozen
        if _made > _MORE:
            collect_and_freeze()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        _made += gc.get_count()[0]  # since `gc.collect(1)`: nothing resets it while collections are disabled
        gc.freeze()
        if was_enabled:
            gc.enable()

"""Garbage collection in a worker, outside of the time in which clients wait for tokens.

A collection stops all threads while it visits objects, and a version of many tensors has many objects: with 18,867 tensors,
each collection took a quarter of a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MORE = 1_000_000  # objects, some 100 MB
_BEFORE_SLEEP = 250_000  # objects
_FEW = 20_000  # objects, which a collection visits in a millisecond or two
_OFTEN = 200  # blocks that froze, of which an install has one or two
_frozen = 0  # objects frozen by the last `collect_and_freeze`
_made = 0  # upper bound on the objects frozen since then by `gc_paused`
_blocks = 0  # blocks of `gc_paused` that froze since then


def collect_and_freeze() -> None:
    """Run a full collection, then freeze all survivors.

    For moments without requests: all threads stop, for 0.4 s with the 650,000 objects of an engine without a model.
    """
    global _frozen, _made, _blocks
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _frozen, _made, _blocks = gc.get_freeze_count(), 0, 0


def collect_before_sleep() -> None:
    """Collect and freeze as `collect_and_freeze` if a quarter of a million objects were added since then.

    Sleep at level 2 would otherwise take five times as long. vLLM itself collects what is not frozen.
    """
    _collect_if_more(_BEFORE_SLEEP)


def _collect_if_more(most: int) -> None:
    """Collect and freeze if more than `most` objects were added by `gc_paused`."""
    global _made
    if _made > most:  # rarely: counting stops all threads for a tenth of a second
        _made = gc.get_freeze_count() - _frozen
        if _made > most:
            collect_and_freeze()


@contextmanager
def gc_paused(*, collect: bool = True) -> Iterator[None]:
    """Disable collections inside the block, and freeze all objects that there are at its end, unless the block made few.

    Frozen objects are freed by reference count alone: those created inside, and those of other threads, such as the engine's of
    requests in progress. Their cycles, and the memory to which these refer, remain until the next `collect_and_freeze`. It runs
    here once a million objects were added since the last one, or after some hundred blocks that froze, unless `collect` is False.
    It stops all threads, an install that is awaited among them: versions of some hundred tensors never come to it.
    """
    global _made, _blocks
    was_enabled = gc.isenabled()
    if collect and _blocks >= _OFTEN:
        collect_and_freeze()
    elif collect:
        _collect_if_more(_MORE)
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        made = gc.get_count()[0]  # since `gc.collect(1)`: nothing resets it while collections are disabled
        if made > _FEW:
            _made += made
            _blocks += 1
            gc.freeze()
        if was_enabled:
            gc.enable()

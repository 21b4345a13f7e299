"""Python's collector of garbage in a worker. It stops every thread while it looks at objects, and a version of many tensors is
many objects: with 18,867 tensors each look took a quarter of a second, while clients waited for tokens."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MORE = 1_000_000  # objects, some 100 MB
_least = 0  # objects that were there at the last sweep
_made = 0  # since then, unswept, or since their number was last looked at; those that are gone again are among them


def sweep() -> None:
    """Of everything; from then on nothing of what is there is looked at. At a boot and before sleep at level 2: nobody waits."""
    global _least, _made
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _least, _made = gc.get_freeze_count(), 0


@contextmanager
def unswept() -> Iterator[None]:
    """What is made meanwhile is not looked at either; it goes when nobody refers to it. Garbage of that time stays until the next
    `sweep`, which is now where a million objects more are there than after the last one."""
    global _made
    swept = gc.isenabled()
    if _made > _MORE:  # to count those that are there takes a tenth of a second of all threads: not each time
        _made = gc.get_freeze_count() - _least
        if _made > _MORE:
            sweep()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        _made += gc.get_count()[0]  # since the line above: while it is disabled nothing else sets it back
        gc.freeze()
        if swept:
            gc.enable()

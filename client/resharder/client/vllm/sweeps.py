"""Python's collector of garbage in a worker. It stops every thread while it looks at objects, and a version of many tensors is
many objects: with 18,867 tensors each look took a quarter of a second, while clients waited for tokens."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MORE = 1_000_000  # objects, some 100 MB
_most = 0


def sweep() -> None:
    """Of everything; from then on nothing of what is there is looked at. At a boot and before sleep at level 2: nobody waits."""
    global _most
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    _most = gc.get_freeze_count() + _MORE


@contextmanager
def unswept() -> Iterator[None]:
    """What is made meanwhile is not looked at either; it goes when nobody refers to it. Garbage of that time stays until the next
    `sweep`, which is now where a million objects more are there than after the last one."""
    swept = gc.isenabled()
    if gc.get_freeze_count() > _most:
        sweep()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if swept:
            gc.enable()

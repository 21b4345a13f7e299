"""Python's collector of garbage in a worker. It stops every thread while it looks at objects, and a version of many tensors is
many objects: with 18,867 tensors each look took a quarter of a second, while clients waited for tokens."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def sweep() -> None:
    """Of everything; from then on nothing of what is there is looked at. Where nobody waits: at a boot, before sleep."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def unswept() -> Iterator[None]:
    """What is made meanwhile is not looked at either; it goes when nobody refers to it. Garbage of that time stays until the next
    `sweep`."""
    swept = gc.isenabled()
    gc.collect(1)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if swept:
            gc.enable()

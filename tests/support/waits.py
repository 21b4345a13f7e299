"""Generators that pause, driven on the thread of the test."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

from resharder.server.infra.change_signal import Pause, result_of


def without_pauses(stream: Iterable[Any]) -> Iterator[Any]:
    """The items of a stream, without its pauses, which block."""
    for item in stream:
        if isinstance(item, Pause):
            item.signal.wait(item.seen, item.seconds)
        else:
            yield item


def completed(act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The result of a call, waited for if the call waits."""
    found = act(*arguments, **options)
    return result_of(found) if isinstance(found, Generator) else found

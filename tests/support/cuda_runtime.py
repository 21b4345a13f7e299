"""CUDA's runtime as far as it registers pages of the host, without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from resharder.client.gpu import pinned_pages


class Runtime:
    """Registers all spans but those that it `refuses`, by their begin and size; `check` is called with the others before."""

    def __init__(self) -> None:
        self.registered, self.calls = dict[int, int](), 0
        self.refuses: Callable[[int, int], bool] = lambda begin, size: False
        self.check: Callable[[int, int], Any] = lambda begin, flags: None

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:
        self.calls += 1
        if self.refuses(begin, size):
            return 1
        assert begin not in self.registered
        self.check(begin, flags)
        self.registered[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:
        del self.registered[begin]
        return 0


def installed(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Put a runtime in place of torch's, called on the calling thread. Pages that are released stay mapped."""
    made = Runtime()
    monkeypatch.setattr(pinned_pages, "_call_driver", lambda call, spans, device, busy: [call(span) for span in spans])
    monkeypatch.setattr(pinned_pages, "forget_pages", lambda span: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made

"""Arrays that lie in registered pages only in part."""

import numpy as np
import pytest
import torch
from numpy.lib.array_utils import byte_bounds
from resharder.client.gpu.pinned_pages import Registered, never

from tests.support.cuda_runtime import Runtime, installed

MEMORY = np.zeros(100, np.uint8)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return installed(monkeypatch)


SPANS = [(10, 20), (20, 30), (30, 40), (50, 60)]


def test_a_registration_that_is_stopped_goes_on_where_it_was(runtime: Runtime) -> None:
    registered = Registered(list(SPANS), torch.device("cpu"), busy=lambda: False)
    assert registered.go_on(lambda: len(runtime.registered) == 3)
    assert (runtime.registered, registered.whole) == ({10: 10, 20: 10, 30: 10}, False)
    assert registered.go_on(never)
    assert (len(runtime.registered), registered.whole) == (4, True)
    registered.close()
    assert not runtime.registered


def test_a_refusal_releases_what_was_registered_before_it(runtime: Runtime) -> None:
    registered = Registered(list(SPANS), torch.device("cpu"), busy=lambda: False)
    assert registered.go_on(lambda: len(runtime.registered) == 1)
    runtime.refuses = lambda begin, size: begin == 50
    assert not registered.go_on(never)
    assert not runtime.registered


@pytest.mark.parametrize(
    ("begin", "end", "split"),
    [
        (0, 20, False),
        (20, 40, False),
        (25, 30, False),
        (45, 50, False),
        (90, 100, False),
        (10, 21, True),
        (39, 50, True),
        (10, 90, True),
        (55, 65, True),  # two registrations that touch
    ],
)
@pytest.mark.usefixtures("runtime")
def test_an_array_is_split_unless_one_registration_has_all_of_it_or_none_has_any(begin: int, end: int, split: bool) -> None:
    first = byte_bounds(MEMORY)[0]
    spans = [(first + 20, first + 40), (first + 50, first + 60), (first + 60, first + 80)]
    registered = Registered(spans, torch.device("cpu"), busy=lambda: False)
    assert registered.go_on(never)
    assert registered.splits(MEMORY[begin:end]) == split

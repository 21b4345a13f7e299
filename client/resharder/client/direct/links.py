"""A rank's links to the groups that it sends to, each met in a thread of its own: to meet takes seconds, in which other servers,
that have met before, may stand still for what this rank sends to them."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch
from resharder.client.direct.group import DirectFailed
from resharder.client.direct.rendezvous import Link
from resharder.client.direct.transfer import Tensors

Failed = Callable[[str, Exception], None]
"""Told of a group that goes wrong, in any thread; its link is dropped by then."""


class Links:
    """`tensors` are what is sent. One thread at a time asks."""

    def __init__(self, tensors: Tensors, device: torch.device) -> None:
        self._tensors, self._device = tensors, device
        self._met: dict[str, Future[Link | None]] = {}
        self._preparing = threading.Lock()  # kernels are compiled

    def meet(self, group: str, make: Callable[[], Link], failed: Failed) -> None:
        """Begins to. `make` is called on a stream of its own; it raises DirectFailed, or RuntimeError where no memory is left."""
        met = self._met[group] = Future[Link | None]()

        def run() -> None:
            link: Link | None = None
            try:
                with self._apart():
                    link = self._prepared(make())
            except (DirectFailed, RuntimeError) as error:
                self._met.pop(group, None)
                failed(group, error)
            finally:
                met.set_result(link)

        threading.Thread(target=run, name="resharder-meet", daemon=True).start()

    def get(self, group: str) -> Link:
        """Once it has been met. Raises DirectFailed where there is none."""
        met = self._met.get(group)
        link = met.result() if met is not None else None
        if link is None:
            raise DirectFailed(f"there is no link of group {group}")
        return link

    def prepare(self, failed: Failed) -> None:
        """Looks where the tensors are, for each link that has been met; the others do so when they have."""
        for group, met in list(self._met.items()):
            link = met.result() if met.done() else None
            if link is not None:
                try:
                    self._prepared(link)
                except DirectFailed as error:
                    self._met.pop(group, None)
                    failed(group, error)

    def _prepared(self, link: Link) -> Link:
        try:
            with self._preparing:
                link.prepare(self._tensors, {})
        except DirectFailed:
            link.close()
            raise
        return link

    def drop(self, group: str) -> None:
        """Lets go of it, or will when it has been met."""
        met = self._met.pop(group, None)
        if met is not None:
            met.add_done_callback(lambda done: link.close() if (link := done.result()) is not None else None)

    def close(self) -> None:
        for group in list(self._met):
            self.drop(group)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Neither behind what the current stream has, nor before what that gets."""
        if self._device.type != "cuda":
            yield
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

"""vLLM's `reload_weights` from a folder: the trainer writes a checkpoint to shared memory, and the server reads it.

The trainer may go on as soon as the folder is written; vLLM is paused for the reading.
"""

import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from benchmarks.systems.base import Points, Sender, Setup, Site, System, WholeTensors, write_folder
from benchmarks.systems.vllm_control import Control


class Writer(WholeTensors):
    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._setup = setup
        self._folder: Path | None = None
        self._pool = ThreadPoolExecutor(1)
        self._reload: Future[float] | None = None

    def open(self, server: str) -> None:
        self._control = Control(server)

    def publish(self, step: int) -> int:
        before = self._folder
        self._folder = Path(mkdtemp(prefix="reload-", dir=self._setup.folder))
        self.checkpoint.write(self._folder, self._setup.own)
        self._written = time.time()
        self._reload = self._pool.submit(self._load, self._folder, before)
        return step

    def _load(self, folder: Path, before: Path | None) -> float:
        with self._control.paused():
            self._control.call("reload_weights", weights_path=str(folder))
            reloaded = time.time()
        if before is not None:
            shutil.rmtree(before)
        return reloaded

    def settle(self) -> Points:
        assert self._reload is not None
        return {"ready": self._written, "transferred": self._reload.result()}


class VllmReload(System):
    name = "vllm-reload"

    def unavailable(self, setup: Setup) -> str:
        return ""

    @contextmanager
    def site(self, setup: Setup) -> Iterator[Site]:
        """vLLM can reload from folders if it was loaded from one."""
        with TemporaryDirectory(prefix="boot-", dir=setup.folder) as folder:
            write_folder(setup, Path(folder), seed=0)
            yield Site(folder=Path(folder))

    def sender(self, setup: Setup) -> Sender:
        return Writer(setup)

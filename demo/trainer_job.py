"""Four Megatron ranks under torchrun: the starter's side of `demo.trainer`."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from demo.jobs import JobFailed, Request, Requests


class TrainerJob:
    """Running trainer job, a context manager. Its output is in FOLDER/trainer.log.

    `settings`: a HF `config`, options of `connect`, and `tp`, `pp`, … of `build_model`. `wrapper` is put before its command line.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        folder: Path,
        settings: dict[str, Any],
        ranks: int = 4,
        module: str = "demo.trainer",
        wrapper: Sequence[str] = (),
    ) -> None:
        self._log_path = folder / "trainer.log"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*wrapper, *torchrun, module, endpoint, model, str(folder), json.dumps(settings)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self.requests = Requests(folder, lambda: self.process.poll() is None)

    def ask(self, **request: Any) -> Request:
        """Send a request and return its reply. Raises JobFailed with the end of the ranks' output."""
        try:
            return self.requests.ask(**request)
        except JobFailed as error:
            raise JobFailed(f"{error}\n{self._log_path.read_text(errors='replace')[-6000:]}") from None

    def tell(self, **request: Any) -> None:
        """Send a request without waiting for its reply."""
        self.requests.send(**request)

    def kill(self) -> None:
        """Send SIGKILL to all ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid)
            for process in [*started.children(recursive=True), started]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.wait()

    def __enter__(self) -> "TrainerJob":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process.poll() is None and kind is None:
            self.tell(do="stop")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        self.kill()

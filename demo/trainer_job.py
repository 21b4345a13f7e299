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
from tests.support.forked import ForkedProcess, start

_ON_IMPORT = {"OMP_NUM_THREADS": "1"}
_IMPORTED = ("tests.support.megatron_models", "resharder.client")


class TrainerJob:
    """Running trainer job, a context manager. Its output is in FOLDER/trainer.log.

    `settings`: a HF `config`, options of `connect`, and `tp`, `pp`, … of `build_model`. `forked`: the ranks import nothing, and
    share the order of their sets, as ranks of a job do not. `hidden`: folders that are empty to them then. `within`: a command
    that runs the others, as on a host of their own.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        folder: Path,
        settings: dict[str, Any],
        ranks: int = 4,
        module: str = "demo.trainer",
        *,
        forked: bool = False,
        hidden: Sequence[Path] = (),
        within: Sequence[str] = (),
    ) -> None:
        self._log_path = folder / "trainer.log"
        environment = os.environ | _ON_IMPORT
        arguments = [module, endpoint, model, str(folder), json.dumps(settings)]
        options: dict[str, Any] = {"session": True, "imported_with": _ON_IMPORT, "preloaded": _IMPORTED, "hidden": hidden}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        self.process: subprocess.Popen[bytes] | ForkedProcess
        with self._log_path.open("wb") as log:
            if forked:
                self.process = start("tests.support.torchrun", environment, log, arguments=[str(ranks), *arguments], **options)
            else:
                self.process = subprocess.Popen(
                    [*within, *torchrun, *arguments],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
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

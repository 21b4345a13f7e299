"""The servers of a run: `left` has tensor parallelism 2, `right` has two API servers. With `sglang`, `left` is one of SGLang."""

import http.client
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support.adapters import RANK
from tests.support.sglang_server import SGLangServer
from tests.support.supervised import shared_memory
from tests.support.vllm_server import Response, VllmServer

BOOT = 900.0
"""Seconds in which a server boots: 25 on two idle cores, up to 300 where others share them."""
_RESTING = (
    b"not serving: an operator put the server to sleep",
    b"not serving: an operator put it to sleep",
    b"not serving: drained for maintenance",
)
_PLUGINS = Path(__file__).parents[1] / "support" / "raw_mode"
_ARGUMENTS = {"left": ["--tensor-parallel-size", "2"], "right": ["--api-server-count", "2"]}
_TITLES = {"api": "VLLM::APIServer", "engine": "VLLM::EngineCore", "worker": "VLLM::Worker"}
_SGLANGS_TITLES = {"api": "sglang.launch_server", "engine": "sglang::detokenizer", "worker": "sglang::scheduler"}


class KeptServer:
    """A deployment of vLLM or, with `sglang`, of SGLang.

    To its processes the folders of `hidden` are empty. `node` is the one of its host, empty for none.
    `tls` are the variables with its certificate; `adapters` those that it follows.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        config: Path,
        folder: Path,
        hidden: list[Path],
        node: str,
        tls: dict[str, str],
        adapters: str = "",
        *,
        sglang: bool = False,
    ) -> None:
        self.name, self.starts, self.folder, self._node = name, 0, folder, node
        self.staging = Path(tempfile.mkdtemp(prefix=f"resharder-chaos-{name}-", dir=shared_memory()))
        environment = {
            "RESHARDER_ENDPOINT": endpoint,
            "RESHARDER_SERVER_ID": name,
            "RESHARDER_HOLD_SECONDS": "5",
            "RESHARDER_VERIFY_SECONDS": "20",
            "RESHARDER_STAGING_DIR": str(self.staging),
            **tls,
        }
        self.environment, self._titles = environment, _SGLANGS_TITLES if sglang else _TITLES
        self.server: VllmServer
        if sglang:
            self.server = SGLangServer(config, (), environment, timeout=BOOT, hidden=hidden, tp=2)
            return
        environment["VLLM_PLUGINS"] = "resharder,raw_mode,dropping_sleep"
        environment["PYTHONPATH"] = os.pathsep.join([str(_PLUGINS), os.environ.get("PYTHONPATH", "")])
        arguments = [*_ARGUMENTS[name], "--load-format", "resharder"]
        if adapters:
            environment["RESHARDER_ADAPTERS"] = adapters
            arguments += ["--enable-lora", "--max-loras", "4", "--max-lora-rank", str(RANK)]
        self.server = VllmServer(config, arguments, environment, timeout=BOOT, hidden=hidden)

    def start(self) -> dict[str, Any]:
        self.starts += 1
        if self._node:
            self.environment["RESHARDER_TRANSPORT"] = "" if self.reads else "http"
        self.server.log = self.folder / f"{self.name}-{self.starts}.log"
        self.server.start()
        self.server.wait_answer(booted, "say that the server has booted", BOOT)
        return {"seconds": round(self.server.ready_seconds, 1)}

    def ended(self) -> int | None:
        return -1 if self.server.process is None else self.server.process.poll()

    def end(self) -> None:
        if self.server.process is not None:
            self.server.kill()

    def answers(self) -> bool:
        """Return whether it answers and its engine lives. After the death of a worker, a server may take a minute to end."""
        with suppress(OSError, http.client.HTTPException):
            return answers(self.server.request("GET", "/health", timeout=5))
        return False

    @property
    def reads(self) -> str:
        """Node through which its present life reads; empty for none."""
        return self._node if self.starts % 2 == 1 else ""

    def part(self, part: str) -> list[psutil.Process]:
        """Return the processes of a part, `api`, `engine`, `worker` or `all`: none if the engine has died before the others."""
        if self.server.process is None or self.server.process.poll() is not None:
            return []
        main = psutil.Process(self.server.process.pid)
        every = [main, *main.children(recursive=True)]
        if part == "all":
            return every
        found = []
        for process in every:
            with suppress(psutil.NoSuchProcess):
                if self._titles[part] in " ".join(process.cmdline()):
                    found.append(process)
        if part == "worker" and not found:  # at TP 1 the engine's process is the worker
            return self.part("engine")
        return found or ([main] if part == "api" else [])


def booted(answer: Response) -> bool:
    """Return whether /health answers as that of a server which serves, or which an operator put to sleep or drained meanwhile."""
    return answer.status == 200 or (answer.status == 503 and any(reason in answer.body for reason in _RESTING))


def answers(answer: Response) -> bool:
    """Return whether /health answers as that of a server whose engine lives, which may state why it does not serve."""
    return answer.status == 200 or (answer.status == 503 and b"not serving: " in answer.body)

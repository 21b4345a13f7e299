"""A real SGLang server on the CPU, for tests that run in `.venv-sglang`, or on GPUs.

    with SGLangServer(folder, env={"RESHARDER_ENDPOINT": endpoint}) as server:
        answer = server.generate([5, 9, 12], max_tokens=8)

It is used as `VllmServer` is. Two stand-ins for packages without a build for CPUs are in `tests/support/sglang`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from tests.support.hidden import hiding
from tests.support.ports import free_port
from tests.support.vllm_server import Answer, Response, ServerFailed, Token, VllmServer

STAND_INS = Path(__file__).with_name("sglang")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "SGLANG_PLUGINS": "resharder",
}
CPU_ENVIRONMENT = ENVIRONMENT | {"SGLANG_USE_CPU_ENGINE": "1"}
SMALL = ["--max-total-tokens", "4096", "--max-running-requests", "8", "--context-length", "512", "--mem-fraction-static", "0.6"]
ON_CPU = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
# Without FlashAttention and FlashInfer; graphs of decoding, as in production.
ON_GPU = ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
GRAPHS = ["--cuda-graph-max-bs-decode", "8", "--disable-prefill-cuda-graph"]
EAGER = ["--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"]

SERVED = ("qwen3", "qwen3_moe")


@cache
def _other_models() -> str:
    """SGLang's modules of models that no test serves: importing all of them takes most of a start."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    return ",".join(sorted(file.stem for file in Path(spec.origin).parent.glob("srt/models/*.py") if file.stem not in SERVED))


def environment(tp: int = 1, gpu: bool = False) -> dict[str, str]:
    """Environment in which SGLang starts on two cores, or on GPUs, without a network."""
    if gpu:
        return ENVIRONMENT | {"SGLANG_DISABLED_MODEL_ARCHS": _other_models()}
    paths = [str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0-1"] * tp)} if tp > 1 else {}
    return CPU_ENVIRONMENT | bound | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_DISABLED_MODEL_ARCHS": _other_models()}


@dataclass
class SGLangServer(VllmServer):
    """`tp`: number of scheduler processes. `gpu`: on GPUs; with `eager`, which is the default, without CUDA graphs.

    `module`: what starts it, with the arguments of `sglang.launch_server`.
    """

    tier = "engine"

    tp: int = 1
    gpu: bool = False
    module: str = "sglang.launch_server"

    def start(self) -> None:
        if self.log is None:
            handle, path = tempfile.mkstemp(prefix="sglang-server-", suffix=".log")
            os.close(handle)
            self.log = Path(path)
        self.port = self.port or free_port()
        arguments = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype]
        device = [*ON_GPU, *(EAGER if self.eager else GRAPHS)] if self.gpu else ON_CPU
        arguments += [*device, *SMALL, "--tp-size", str(self.tp), "--sleep-on-idle", *self.args]
        wanted = {**os.environ, **environment(self.tp, self.gpu), **self.env}
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [*(hiding(self.hidden) if self.hidden else ()), sys.executable, "-m", self.module, *arguments],
                env={name: value for name, value in wanted.items() if value is not None},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """SIGTERM to its first process, which ends the others; then SIGKILL for what is left of the group."""
        process = self._process()
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        self.kill()

    def complete(self, prompt: Sequence[int] | str, max_tokens: int, timeout: float = 300, **options: Any) -> Response:
        return self.request("POST", "/generate", asked(prompt, max_tokens, **options), timeout)

    def read(self, response: Response) -> Answer:
        found = response.json()
        chosen, meta = found["meta_info"]["output_token_logprobs"], found["meta_info"]
        logprobs = tuple(logprob for logprob, *_ in chosen)
        return Answer(tuple(found["output_ids"]), logprobs, meta["finish_reason"]["type"], response.version)

    def stream(self, prompt: Sequence[int] | str, max_tokens: int = 12, timeout: float = 300, **options: Any) -> Iterator[Token]:
        body = asked(prompt, max_tokens, stream=True, **options)
        with self._send("POST", "/generate", body, timeout) as (status, _, answer):
            if status != 200:
                raise ServerFailed(f"expected 200 for a stream, got {status}: {answer.read()[:500]!r}")
            seen = 0
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ServerFailed(f"the stream broke: {event['error']}")
                found, at = event["meta_info"]["output_token_logprobs"], time.monotonic()
                for logprob, token_id, *_ in found[seen:]:
                    yield Token(token_id, logprob, at)
                seen = len(found)

    def child(self, title: str) -> psutil.Process:
        """The last of the server's processes whose title, which SGLang gives it, begins so: `scheduler`, `detokenizer`."""
        found = []
        for one in psutil.Process(self._process().pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended, or is a zombie
                if " ".join(one.cmdline()).startswith(f"sglang::{title}"):
                    found.append(one)
        if not found:
            raise ServerFailed(f"expected a process sglang::{title}")
        return found[-1]


def asked(prompt: Sequence[int] | str, max_tokens: int, **options: Any) -> dict[str, Any]:
    """The body of a greedy request that answers with exactly `max_tokens` token ids and their logprobs."""
    given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {**given, "sampling_params": sampling, "return_logprob": True, **options}

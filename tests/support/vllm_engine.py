"""A real vLLM engine with its worker in one child process, driven over a pipe; starts faster than a server and takes less memory.

The child is forked from a process that has done nothing but import vLLM, which takes longer than all the rest.

with Engine(folder, raw=True, environment={"RESHARDER_ENDPOINT": daemon.endpoint}) as engine:
    engine.rpc("resharder_describe")
"""

import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

_RAW_MODE = Path(__file__).parent / "raw_mode"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
PROMPT = [5, 6, 7, 8, 9, 10]
PRELOADED = (
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.registry",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that `vllm_preload` imports: 8 s of a processor, which each engine spends otherwise.
"""


class Engine:
    """`raw`: linear layers keep their parameters. A sleep loses what it loses on a GPU. `options` are vLLM's engine arguments."""

    tier = "engine"

    def __init__(self, model: Path, *, raw: bool = False, environment: Mapping[str, str] | None = None, **options: Any) -> None:
        plugins = ["resharder", "dropping_sleep", *(["raw_mode"] if raw else [])]
        environment = ENVIRONMENT | {"VLLM_PLUGINS": ",".join(plugins)} | dict(environment or {})
        options = {
            "model": str(model),
            "max_model_len": 512,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "dtype": "auto",
            "kv_cache_memory_bytes": 1 << 26,
        } | options
        if options["enforce_eager"]:
            environment["TORCH_COMPILE_DISABLE"] = "1"  # vLLM compiles a helper of its sampler even so: 3 s
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.vllm_preload"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, environment, options), daemon=False)
        self._process.start()
        theirs.close()
        self._answer()

    def rpc(self, method: str, *args: Any) -> list[dict[str, Any]]:
        """One answer per worker."""
        return self._ask("rpc", method, args)

    def one(self, method: str, *args: Any) -> dict[str, Any]:
        (answer,) = self.rpc(method, *args)
        return answer

    def logprobs(
        self, prompt: list[int], tokens: int = 8, adapter: Path | tuple[str, int, int] | None = None
    ) -> list[tuple[int, float]]:
        """(token, logprob) of a greedy continuation, by an adapter if one is given: a folder, or (model, id, version)."""
        (answer,) = self._ask("logprobs", prompt, tokens, [adapter])
        return answer

    def logprobs_together(
        self, prompt: list[int], tokens: int, adapters: Sequence[Path | tuple[str, int, int] | None]
    ) -> list[list[tuple[int, float]]]:
        """`logprobs` of requests that are computed in the same steps, one for each adapter; None is the base."""
        return self._ask("logprobs", prompt, tokens, list(adapters))

    def add_adapter(self, folder: Path) -> bool:
        """Whether vLLM's own loader took the adapter of a folder into a slot."""
        return self._ask("add_adapter", folder)

    def weight_versions(self, prompt: list[int], tokens: int) -> list[tuple[str, int, int]]:
        """vLLM's own (version, first token, end) of a greedy continuation."""
        return self._ask("weight_versions", prompt, tokens)

    def sleep(self, level: int) -> None:
        self._ask("sleep", level)

    def wake(self, *tags: str) -> None:
        self._ask("wake", list(tags))

    @property
    def paused(self) -> bool:
        return bool(self._ask("paused"))

    def core(self, method: str, *args: Any) -> Any:
        """Answer of a method of the engine core, called as its clients call it."""
        return self._ask("core", method, args)

    def environ(self, **values: str) -> None:
        self._ask("environ", values)

    def install(self, version: str, install: str) -> dict[str, Any]:
        """Stages and applies in every worker; the first worker's answer."""
        for answer in self.rpc("resharder_stage", install, version):
            assert answer["ok"], answer["error"]
        self.wait_staged(install)
        return self.rpc("resharder_apply", install)[0]

    def wait_staged(self, install: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not all(answer["staged"] == install for answer in self.rpc("resharder_describe")):
            assert time.monotonic() < deadline, f"{install} was not staged in {timeout:g} s"
            time.sleep(0.05)

    def _ask(self, *message: Any) -> Any:
        self._pipe.send(message)
        return self._answer()

    def _answer(self) -> Any:
        try:
            ok, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended") from None
        if not ok:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def weights(engine: Engine) -> list[dict[str, int]]:
    """Of each worker: all tensors but the addresses of packed weights, which only logits can compare."""
    answers = engine.rpc("resharder_fingerprint")
    return [{path: value for path, value in a["tensors"].items() if not path.endswith("handler_tensor")} for a in answers]


def _hide_amx() -> None:
    """Have vLLM take the kernels of processors without AMX, so that engines are the same on all.

    With AMX, an engine of vLLM 0.32 ended by an illegal instruction in `cpu_attention_with_kv_cache`, and MLA failed for the
    sizes of tiny models (`invalid weight input features 24`) and in installs.
    """
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def _serve(pipe: Connection, environment: dict[str, str], options: dict[str, Any]) -> None:
    os.environ.update(environment)
    sys.path.insert(0, str(_RAW_MODE))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_RAW_MODE), os.environ.get("PYTHONPATH", "")])
    _hide_amx()
    if environment.get("TORCH_COMPILE_DISABLE"):
        import torch._dynamo

        torch._dynamo.config.disable = True  # the preload has read the environment before
    try:
        from vllm import LLM

        engine = LLM(**options)
    except Exception as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
        return
    pipe.send((True, None))
    acts: dict[str, Callable[..., Any]] = {
        "rpc": lambda method, args: engine.collective_rpc(method, args=args),
        "logprobs": lambda prompt, tokens, adapters: _logprobs(engine, prompt, tokens, adapters),
        "add_adapter": lambda folder: engine.llm_engine.add_lora(_request(folder)),
        "weight_versions": lambda prompt, tokens: _weight_versions(engine, prompt, tokens),
        "core": lambda method, args: getattr(engine.llm_engine.engine_core.engine_core, method)(*args),
        "sleep": engine.sleep,
        "wake": engine.wake_up,
        "paused": engine.llm_engine.is_sleeping,  # true of an engine that is awake and only paused
        "environ": os.environ.update,
    }
    while True:
        try:
            name, *args = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, acts[name](*args)))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))
    # No atexit: vLLM's in-process engine may wait for threads of its own.
    os._exit(0)


def _request(adapter: Path | tuple[str, int, int]) -> Any:
    from vllm.lora.request import LoRARequest

    if isinstance(adapter, tuple):  # name, id and version, of one that the plugin has loaded
        from resharder.client.inference.vllm.adapter_ids import request_of

        return request_of(*adapter)
    return LoRARequest(adapter.name, zlib.crc32(str(adapter).encode()), str(adapter))


def _logprobs(engine: Any, prompt: list[int], tokens: int, adapters: Sequence[Any]) -> list[list[tuple[int, float]]]:
    from vllm import SamplingParams

    engine.reset_prefix_cache()
    settings = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True)
    requests = [_request(adapter) if adapter else None for adapter in adapters]
    prompts = [{"prompt_token_ids": prompt}] * len(requests)
    answers = [each.outputs[0] for each in engine.generate(prompts, settings, use_tqdm=False, lora_request=requests)]
    return [[(token, found[token].logprob) for token, found in zip(a.token_ids, a.logprobs, strict=True)] for a in answers]


def _weight_versions(engine: Any, prompt: list[int], tokens: int) -> list[tuple[str, int, int]]:
    from vllm import SamplingParams

    settings = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    (output,) = engine.generate({"prompt_token_ids": prompt}, settings, use_tqdm=False)
    return [(span.version, span.start, span.end) for span in output.outputs[0].weight_versions]

"""The two engines for tests of both: their servers, their refusals, and how their tensors are read.

`INSTALLED` is the engine of the environment in which the tests run: SGLang in that of `make test-sglang`, otherwise vLLM.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.sglang_server import SGLangServer
from tests.support.tensor_hashes import PLUGINS, hashes, new_socket
from tests.support.vllm_server import VllmServer

Environment = Mapping[str, str | None]


@dataclass(frozen=True)
class EngineKind:
    name: str
    """Name in metrics."""
    follower: Callable[[Path, Sequence[str], Environment], VllmServer]
    """Returns a server of a folder, with further arguments and environment, whose linear layers keep their weights as loaded."""
    alone: Callable[[Path], VllmServer]
    """Returns a server that loads a folder itself and knows nothing of Resharder."""
    tensors: Callable[[VllmServer], Any]
    """Returns what identifies the content of each tensor that a server's models reach, by means of the engine."""
    forget: Callable[[VllmServer], None]
    """Drops the prefixes that a server has cached."""
    weight_version: Callable[[VllmServer], str]
    """Returns the engine's own name of its weights; empty if it does not say one."""
    refused: Sequence[tuple[str, Any]]
    """Calls by POST that change the engine."""
    with_metrics: Sequence[str] = ()
    """Arguments of a server with a page of metrics."""


def _vllm(folder: Path, arguments: Sequence[str], environment: Environment, plugins: str = "resharder,") -> VllmServer:
    env = {
        "VLLM_PLUGINS": f"{plugins}raw_mode,tensor_hashes",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": PLUGINS,
        "TENSOR_HASHES": new_socket(),
        **environment,
    }
    return VllmServer(folder, arguments, env)


def _vllms_version(server: VllmServer) -> str:
    response = server.request("GET", "/weight_info")
    return str(response.json()["weight_version"]) if response.status == 200 else ""  # before 0.28, there is none


def _flush(server: VllmServer) -> None:
    assert server.request("POST", "/flush_cache").status == 200


def checksums(server: VllmServer) -> list[dict[str, str]]:
    """SGLang's own checksum of each tensor of its model, of each rank. That of 0.5.17 needs a GPU: without, nothing."""
    response = server.request("POST", "/weights_checker", {"action": "checksum"})
    if b"Torch not compiled with CUDA" in response.body or b"NVIDIA driver" in response.body:
        return []
    assert response.status == 200, response.body
    return [rank["checksums"] for rank in response.json()["ranks"]]


def alone_with_sglang(folder: Path, tp: int = 1) -> SGLangServer:
    return SGLangServer(folder, env={"RESHARDER_ENDPOINT": None, "SGLANG_PLUGINS": "none"}, tp=tp)


VLLM = EngineKind(
    name="vllm",
    follower=lambda folder, arguments, environment: _vllm(folder, ["--load-format", "resharder", *arguments], environment),
    alone=lambda folder: _vllm(folder, [], {"RESHARDER_ENDPOINT": None}, plugins=""),
    tensors=lambda server: hashes(str(server.env["TENSOR_HASHES"])),
    forget=lambda server: None,  # no prompt of the tests fills a block
    weight_version=_vllms_version,
    refused=(
        ("/update_weights", {"update_info": {}}),
        ("/start_weight_update", {}),
        ("/pause", {}),
        ("/resume", {}),
        ("/release_kv_cache_memory", {}),
        ("/update_weight_version", {"weight_version": "9"}),
        ("/collective_rpc", {"method": "reload_weights"}),
    ),
)
SGLANG = EngineKind(
    name="sglang",
    follower=SGLangServer,
    alone=alone_with_sglang,
    tensors=checksums,
    forget=_flush,
    weight_version=lambda server: str(server.request("GET", "/model_info").json()["weight_version"]),
    refused=(
        ("/update_weights_from_disk", {"model_path": "/nowhere"}),
        ("/update_weights_from_tensor", {}),
        ("/pause_generation", {"mode": "abort"}),
        ("/continue_generation", {}),
        ("/release_memory_occupation", {}),
        ("/update_weight_version", {"new_version": "9"}),
        ("/weights_checker", {"action": "reset_tensors"}),
    ),
    with_metrics=("--enable-metrics",),
)
INSTALLED = SGLANG if find_spec("sglang") else VLLM

"""vLLM's own weight transfer (0.26 to 0.32): `nccl`, packed, between two GPUs; `ipc`, CUDA IPC within one; `nccl_m2n`, NCCL's
M2N, between two (0.30 and later).

vLLM is paused while it receives. It keeps no version, and verifies nothing.
"""

import base64
import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, Literal

import torch

from benchmarks.systems.base import Points, Sender, Setup, Site, System, WholeTensors, missing, needs_gpus
from benchmarks.systems.vllm_control import Control
from tests.support.ports import free_port

Backend = Literal["nccl", "ipc", "nccl_m2n"]
_PACKAGE = "vllm.distributed.weight_transfer"


class Client(Control):
    """Client that vLLM's trainer engines call. `received`: time at which the workers have the last update."""

    received = 0.0

    def update_weights(self, update_info: Any) -> None:
        if handles := update_info.pop("ipc_handles", None):
            update_info["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        super().update_weights({name: value for name, value in update_info.items() if value is not None})
        self.received = time.time()


class Transfer(WholeTensors):
    def __init__(self, setup: Setup, backend: Backend) -> None:
        super().__init__(setup)
        torch.cuda.set_device(self.device)
        self._backend = backend

    def open(self, server: str) -> None:
        self._client = Client(server)
        port = free_port()
        meeting = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
        from vllm.distributed.weight_transfer import nccl_engine

        if not hasattr(nccl_engine, "NCCLTrainerInitInfo"):
            self._send = self._by_static_methods(meeting)
            return
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        described, source = described_trainer(self._backend, meeting), source_of(self._backend, self.tensors)
        self._send = WeightTransferTrainerFactory.trainer_init(described, client=self._client, source=source).send_weights

    def _by_static_methods(self, meeting: dict[str, Any]) -> Any:
        """Return the function that sends, as vLLM 0.26 and 0.27 have it."""
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

            self._client.init_weight_transfer_engine({})

            def send() -> None:
                self._client.start_weight_update()
                way = {"send_mode": lambda update: self._client.update_weights(asdict(update))}
                IPCWeightTransferEngine.trainer_send_weights(iter(self.tensors.items()), way)
                self._client.finish_weight_update()

            return send
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        with ThreadPoolExecutor(1) as pool:  # both sides meet within the call
            joined = pool.submit(self._client.init_weight_transfer_engine, meeting | {"rank_offset": 1})
            group = NCCLWeightTransferEngine.trainer_init(meeting)
            joined.result()
        described = {
            "names": list(self.tensors),
            "dtype_names": ["bfloat16"] * len(self.tensors),
            "shapes": [list(each.shape) for each in self.tensors.values()],
            "packed": True,
        }

        def send_packed() -> None:
            self._client.start_weight_update()
            with ThreadPoolExecutor(1) as pool:
                received = pool.submit(self._client.update_weights, dict(described))
                NCCLWeightTransferEngine.trainer_send_weights(iter(self.tensors.items()), {"group": group, "packed": True})
                torch.cuda.synchronize()
                received.result()
            self._client.finish_weight_update()

        return send_packed

    def publish(self, step: int) -> int:
        with self._client.paused():
            self._send()
        return step

    def settle(self) -> Points:
        return {"transferred": self._client.received}


def described_trainer(backend: Backend, meeting: dict[str, Any]) -> Any:
    """Return vLLM's description of a single trainer rank, with its defaults. `meeting`: address, port and size of the group."""
    if backend == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        return IPCTrainerInitInfo(rank=0)
    if backend == "nccl_m2n":
        from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo

        return M2NTrainerInitInfo(rank=0, **meeting)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    return NCCLTrainerInitInfo(rank=0, **meeting)


def source_of(backend: Backend, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tensors as vLLM's source of weights: whole, on one rank."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    described = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    base: Any = WeightSource
    if backend == "nccl_m2n":
        from vllm.distributed.weight_transfer.m2n_common import M2NMesh, M2NParamMeta
        from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

        described = [M2NParamMeta(each.name, each.dtype, each.shape, None) for each in described]
        base = M2NWeightSource

    class Source(base):
        def mesh(self) -> Any:
            return M2NMesh((1, 1), 0)

        def metadata(self) -> list[Any]:
            return described

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(tensors.items())

    return Source()


class VllmTransfer(System):
    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = f"vllm-{backend.replace('_', '-')}", backend

    def unavailable(self, setup: Setup) -> str:
        if reason := needs_gpus(setup, apart=self._backend != "ipc"):
            return reason
        if self._backend == "ipc" and len(set(setup.gpus)) > 1:
            return "needs trainer and server on one GPU"
        if self._backend == "ipc" and version("vllm").startswith(("0.26.", "0.27.")) and missing("ray"):
            return "ray is not installed, which this engine of vLLM 0.26 and 0.27 imports"
        if self._backend == "nccl_m2n":
            if missing(f"{_PACKAGE}.m2n_engine"):
                return "needs vLLM 0.30 or later"
            if missing("nccl.m2n"):
                return "nccl-extensions is not installed"
        return ""

    @contextmanager
    def site(self, setup: Setup) -> Iterator[Site]:
        arguments = ["--load-format", "dummy", "--weight-transfer-config", json.dumps({"backend": self._backend})]
        yield Site(arguments, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})

    def sender(self, setup: Setup) -> Sender:
        return Transfer(setup, self._backend)

"""Versions into an SGLang server, beside SGLang's own updates in the same run: `python -m benchmarks.sglang_update --gpus 0,0`.

One Megatron rank publishes to a server while a client streams; then a server without the plugin loads the last version from a
folder. Every tensor that the model reaches and every log-probability have to be the same in both. The second
server then takes the same weights by `/update_weights_from_disk` from memory and, with a GPU of its own, by
`/update_weights_from_distributed` in buckets, as slime's trainers send them. `--gpus`: the rank's and the servers'; without it, a
tiny model on a CPU, over gloo. `--eager`: without CUDA graphs. `--sleep`: the first server sleeps at both levels too, and what it
answers afterwards has to be the same. `--quantization fp8`: the rank casts to FP8 blocks; `/update_weights_from_disk` then takes
the place of both of SGLang's updates. Further arguments are those of both servers, for example `--moe-runner-backend triton`.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
from resharder.client.operator import Operator
from resharder.client.operator.answers import Power
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.direct_system import CPU_JOBS, GPU_JOBS, PATIENCE, Client, System
from benchmarks.stores import fast_store
from tests.support.engine_kinds import SGLANG, alone_with_sglang
from tests.support.engine_site import contents
from tests.support.observing import export, servers, wait_serving
from tests.support.ports import free_port
from tests.support.sglang_server import STAND_INS, SGLangServer
from tests.support.tensor_hashes import PLUGINS, Held, differing, hashes, new_socket

BUCKET = 1 << 30  # bytes
SLEEP_MODE = ("--enable-memory-saver", "--enable-weights-cpu-backup")
GROUP = "weight_update_group"


class SGLangSystem(System):
    """A system with one SGLang server."""

    def __init__(
        self, *args: Any, eager: bool, gpus: str, sleeps: bool, arguments: Sequence[str], plugins: str, **options: Any
    ) -> None:
        super().__init__(*args, eager=eager, gpus=gpus, **options)
        env: dict[str, str | None] = {
            "RESHARDER_ENDPOINT": self.daemon.endpoint,
            "RESHARDER_SERVER_ID": "server-0",
            "CUDA_VISIBLE_DEVICES": ",".join(self.gpus[0]),
        }
        env |= with_plugins(f"resharder,{plugins}", gpu=bool(gpus))
        more = [*arguments, *(SLEEP_MODE if sleeps and gpus else ())]
        self.servers = [SGLangServer(self.folder, more, env, dtype="bfloat16", eager=eager, timeout=PATIENCE, gpu=bool(gpus))]


def with_plugins(plugins: str, gpu: bool) -> dict[str, str]:
    """Environment of a server with plugins, some of which are the tests'."""
    folders = [*([] if gpu else [str(STAND_INS)]), PLUGINS, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"SGLANG_PLUGINS": plugins, "PYTHONPATH": os.pathsep.join(folders), "TENSOR_HASHES": new_socket()}


def held(server: SGLangServer) -> tuple[Held, list[Any]]:
    """Hashes of every tensor that the model reaches, and answers."""
    return hashes(str(server.env["TENSOR_HASHES"])), contents(SGLANG, server)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="")
    parser.add_argument("--model", type=int, default=0, choices=(0, 1))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--quantization", choices=["fp8"], help="format to which the rank casts")
    asked, arguments = parser.parse_known_args()
    cpu = not asked.gpus
    job = (CPU_JOBS if cpu else GPU_JOBS)[asked.model]
    job = job.in_fp8() if asked.quantization else job
    plugins = "tensor_hashes" + (",reference_fp8" if asked.quantization and cpu else "")  # SGLang's kernels for a CPU need AMX
    with fast_store() as (folder, kind):
        store = folder / "store"
        options = {"eager": asked.eager, "gpus": asked.gpus, "sleeps": asked.sleep, "arguments": arguments, "plugins": plugins}
        with SGLangSystem(job, 1, 1, 1, cpu, **options, store=store) as system:
            rows, path = installs(system, asked.versions)
            checkpoint = folder / "checkpoint"
            export(system.daemon, f"models/policy/versions/{system.newest}", checkpoint)
            (server,) = system.servers
            ours = held(server)
            if failed := system.events("direct_failed"):
                print(*(f"direct path: {line['reason']}" for line in failed), system.trainer_log()[-3000:], sep="\n")
            show(rows, f"{job.name}, {size_of(checkpoint) / 1e9:.1f} GB, the store is in {kind}, path: {path}")
            if asked.sleep:
                sleeps(system, asked.gpus)
                tensors, answers = held(server)
                print(f"as before it slept: tensors {tensors == ours[0]}, answers {answers == ours[1]}")
            server.stop()
            system.trainer.kill()
        with own_server(checkpoint, asked.gpus, asked.eager, arguments, plugins) as fresh:
            tensors, answers = held(fresh)
            print(f"as a fresh server: {sum(map(len, tensors))} tensors {ours[0] == tensors}, answers {ours[1] == answers}")
            print(f"that differ: {differing(ours[0], tensors)[:8]}")
            print(f"update_weights_from_disk: {took([from_disk(fresh, checkpoint) for _ in range(asked.versions)])}")
            if not asked.quantization and (cpu or len(set(asked.gpus.split(","))) > 1):
                with Sender(fresh, checkpoint, "cpu" if cpu else f"cuda:{asked.gpus.split(',')[0]}") as sender:
                    print(f"update_weights_from_distributed: {took([sender.send() for _ in range(asked.versions)])}")
            print(f"still equal: {held(fresh)[0] == tensors}")
        if ours != (tensors, answers):
            raise SystemExit("the weights or answers differ from a fresh server's")


def installs(system: System, count: int) -> tuple[list[dict[str, float]], str]:
    """Publish versions while a client streams; return the times of each, and what the last one came over."""
    (server,) = system.servers
    client, rows = Client(server), []
    for _ in range(count):
        time.sleep(1)  # as between steps
        client.longest()
        version = system.publish()
        times = system.happened(version)
        time.sleep(0.3)  # the next token
        gap, _ = client.longest()
        rows.append({"held": system.published_seconds, **times, "gap": gap})
    client.end()
    (worker,) = servers(system.daemon)[0].workers
    return rows, worker.path or worker.transport


def sleeps(system: System, gpus: str) -> None:
    """Put the server to sleep and wake it, at each level."""
    version = system.newest
    with Operator(system.daemon.endpoint) as operator:
        for level, asleep in enumerate((Power.ASLEEP_1, Power.ASLEEP_2), 1):
            before, began = free_bytes(gpus), time.monotonic()
            operator.sleep("policy", level=level)
            operator.wait_power("policy", asleep, timeout=PATIENCE)
            slept, freed = time.monotonic() - began, free_bytes(gpus) - before
            began = time.monotonic()
            operator.wake("policy")
            operator.wait_power("policy", Power.AWAKE, timeout=PATIENCE)
            wait_serving(system.daemon, version, PATIENCE)
            print(
                f"level {level}: asleep in {slept:.2f} s, {freed / 1e9:.1f} GB freed, serves in {time.monotonic() - began:.2f} s"
            )


def free_bytes(gpus: str) -> int:
    return int(torch.cuda.mem_get_info(int(gpus.split(",")[-1]))[0]) if gpus else 0


def show(rows: list[dict[str, float]], title: str) -> None:
    table = Table("version", *rows[0], title=title)
    for number, row in enumerate(rows, 2):
        table.add_row(str(number), *(f"{row[name]:.3f}" for name in rows[0]))
    table.add_row("median", *(f"{median(row[name] for row in rows):.3f}" for name in rows[0]))
    Console(width=130).print(table)


def took(seconds: list[float]) -> str:
    return f"median {median(seconds):.3f} s of {', '.join(f'{each:.3f}' for each in seconds)}"


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def own_server(checkpoint: Path, gpus: str, eager: bool, arguments: Sequence[str], plugins: str) -> SGLangServer:
    """A server without Resharder's plugin, on the servers' GPU."""
    server = alone_with_sglang(checkpoint)
    server.args, server.env = list(arguments), server.env | with_plugins(plugins, gpu=bool(gpus))
    server.dtype, server.eager, server.timeout, server.gpu = "bfloat16", eager, PATIENCE, bool(gpus)
    server.env = {**server.env, **({"CUDA_VISIBLE_DEVICES": gpus.split(",")[-1]} if gpus else {})}
    return server


def from_disk(server: SGLangServer, checkpoint: Path) -> float:
    """Load the checkpoint again by SGLang's route, and return the seconds that it took."""
    began = time.monotonic()
    asked(server, "/update_weights_from_disk", {"model_path": str(checkpoint)})
    return time.monotonic() - began


def asked(server: SGLangServer, path: str, body: Any) -> None:
    response = server.request("POST", path, body, PATIENCE)
    if response.status != 200 or not response.json().get("success", True):
        raise RuntimeError(f"{path}: {response.status} {response.body[:500]!r}")


class Sender:
    """A trainer's process group with a server, as slime's: rank 0 broadcasts tensors that the server loads; a context manager."""

    def __init__(self, server: SGLangServer, checkpoint: Path, device: str) -> None:
        self._server, self._device = server, torch.device(device)
        self._tensors = dict(self._read(checkpoint))

    def _read(self, checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(checkpoint.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    yield name, opened.get_tensor(name).to(self._device)

    def __enter__(self) -> "Sender":
        from sglang.srt.utils.common import init_custom_process_group

        port, backend = free_port(), "nccl" if self._device.type == "cuda" else "gloo"
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # As SGLang sets it for its processes (srt/entrypoints/engine.py): NCCL does not connect two GPUs that differ in it.
            os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        with self._answering("/init_weights_update_group", body | {"group_name": GROUP, "backend": backend}):
            self._group = init_custom_process_group(
                backend=backend,
                init_method=f"tcp://127.0.0.1:{port}",
                world_size=2,
                rank=0,
                group_name=GROUP,
                timeout=timedelta(seconds=120),
            )
        return self

    def __exit__(self, *error: object) -> None:
        torch.distributed.destroy_process_group(self._group)

    def send(self) -> float:
        """Send all tensors in buckets, and return the seconds until the server has loaded the last."""
        began = time.monotonic()
        buckets: list[list[str]] = [[]]
        filled = 0
        for name, tensor in self._tensors.items():
            if filled and filled + tensor.nbytes > BUCKET:
                buckets.append([])
                filled = 0
            buckets[-1].append(name)
            filled += tensor.nbytes
        for number, names in enumerate(buckets, 1):
            tensors = [self._tensors[name] for name in names]
            body = {
                "names": names,
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
                "shapes": [list(tensor.shape) for tensor in tensors],
                "group_name": GROUP,
                "flush_cache": number == len(buckets),
            }
            with self._answering("/update_weights_from_distributed", body):
                works = [torch.distributed.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors]
                for work in works:
                    work.wait()
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
        return time.monotonic() - began

    def _answering(self, path: str, body: Any) -> "_Asking":
        return _Asking(self._server, path, body)


class _Asking:
    """A request that is answered once the block has done its part; raises what the request raised."""

    def __init__(self, server: SGLangServer, path: str, body: Any) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._ask, args=(server, path, json.loads(json.dumps(body))), daemon=True)

    def _ask(self, server: SGLangServer, path: str, body: Any) -> None:
        try:
            asked(server, path, body)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._thread.join(PATIENCE)
        if self._error is not None:
            raise self._error


if __name__ == "__main__":
    main()

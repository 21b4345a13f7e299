"""Processes of `benchmarks.hosts`: `python -m benchmarks.host_ways ROLE ARGUMENT…`, controlled by lines.

    serve FILE FOLDER                  answers requests of (offset, size) by sendfile; with FOLDER, over TLS by its certificates
    plain PORT SIZE FOLDER             reads all of it into a warm mapped file
    version ENDPOINT NAME HELD         reads a version as a worker's helper does, into a warm mirror
    source ENDPOINT NAME               reads all tensors of a version in order as `whole_tensors` does, and digests them
    rank ENDPOINT TRANSPORT HELD       publishes a version as a rank does

HELD is `rows` (whole tensors) or `columns` (halves; a reader takes one half).

Each prints one line when it is ready. A reader reads, and a rank publishes, once for each line of its input, the step, and
prints `{"seconds": …, "cpu": …}`; a rank's seconds end when the daemon has all bytes, its `ready` at READY.
"""

import json
import mmap
import os
import socket
import ssl
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resharder.converters.geometry.layout import Box

PIECE_BYTES = 16 << 20
REQUEST = struct.Struct("<QQ")


def context(folder: str, side: ssl.Purpose) -> ssl.SSLContext:
    """The TLS context of a side, with the certificates that `tests.support.secure` writes."""
    server = side is ssl.Purpose.CLIENT_AUTH
    made = ssl.create_default_context(side, cafile=f"{folder}/ca.pem")
    name = "daemon" if server else "reader.test"
    made.load_cert_chain(f"{folder}/{name}.pem", f"{folder}/{name}.key")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def serve(path: str, folder: str) -> None:
    tls = context(folder, ssl.Purpose.CLIENT_AUTH) if folder else None
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    while True:
        threading.Thread(target=_answer, args=(listener.accept()[0], path, tls), daemon=True).start()


def _answer(connected: socket.socket, path: str, tls: ssl.SSLContext | None) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    secure = tls.wrap_socket(connected, server_side=True) if tls else None
    with open(path, "rb", buffering=0) as file:
        block = memoryview(bytearray(256 << 10))
        while len(asked := (secure or connected).recv(REQUEST.size)) == REQUEST.size:
            at, size = REQUEST.unpack(asked)
            end = at + size
            while at < end and secure is None:
                at += os.sendfile(connected.fileno(), file.fileno(), at, end - at)
            while at < end and secure is not None:
                read = os.preadv(file.fileno(), [block[: end - at]], at)
                secure.sendall(block[:read])
                at += read


def plain(port: str, size: str, folder: str) -> None:
    total = int(size)
    descriptor = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, total)
    target = memoryview(mmap.mmap(descriptor, total))
    for at in range(0, total, mmap.PAGESIZE):
        target[at] = 0
    opened: socket.socket = socket.create_connection(("127.0.0.1", int(port)))
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if folder:
        opened = context(folder, ssl.Purpose.SERVER_AUTH).wrap_socket(opened, server_hostname="localhost")

    def read() -> None:
        for start in range(0, total, PIECE_BYTES):
            at, end = start, min(total, start + PIECE_BYTES)
            opened.sendall(REQUEST.pack(start, end - start))
            while at < end:
                at += opened.recv_into(target[at:end])

    _rounds(read)


def version(endpoint: str, name: str, held: str) -> None:
    from resharder.client.inference.worker.fetch import fetch
    from resharder.client.inference.worker.source import Mirror
    from resharder.client.rpc.channel import Channel
    from resharder.client.versions.manifest import boxes_request, expected_digests, get_manifest

    with Channel(endpoint) as channel:
        manifest = get_manifest(channel, name)
        boxes = [(tensor, held_box(spec.shape, held)) for tensor, spec in manifest.specs.items()]
        digests = expected_digests(channel, manifest, {tensor: (box,) for tensor, box in boxes})
        expected = [digests[wanted] for wanted in boxes]
        mirror, request = Mirror("/dev/shm"), boxes_request(manifest.name, boxes)

        def read() -> None:
            files = mirror.prepare(manifest.files)
            if fetch(channel, [file.path for file in files], request) != expected:
                raise SystemExit("expected every digest of the store, got others")

        _rounds(read)


def held_box(shape: tuple[int, ...], held: str) -> "Box":
    """The box of a tensor that a reader needs."""
    from resharder.converters.geometry.layout import Range, full_box

    box = full_box(shape)
    return (*box[:-1], Range(0, shape[-1] // 2)) if held == "columns" and len(shape) == 2 else box


def source(endpoint: str, name: str) -> None:
    from resharder.client.versions import source
    from resharder.client.versions.source import whole_tensors

    with source.open_source(f"{source.SCHEME}{endpoint}/{name}", shared=False) as opened:
        _rounds(lambda: deque(whole_tensors(opened), maxlen=0))


def rank(endpoint: str, transport: str, held: str) -> None:
    import torch
    from resharder.client import connect
    from resharder.client.trainer.connect import DeclaredTensor

    from benchmarks.shapes import QWEN3_0_6B
    from tests.support.weights import random_weights

    parts: list[tuple[str, tuple[slice, ...], torch.Tensor]] = []
    declared = []
    for name, tensor in random_weights(QWEN3_0_6B, 1, torch.bfloat16).items():
        half, columns = tensor.shape[-1] // 2, held == "columns" and tensor.dim() == 2
        for cut in (slice(half), slice(half, None)) if columns else (slice(None),):
            index = (*[slice(None)] * (tensor.dim() - 1), cut)
            parts.append((name, index, tensor[index].contiguous()))
            declared.append(DeclaredTensor(name, torch.bfloat16, tuple(tensor.shape), index))
    with connect(endpoint, model="policy", job="j", rank=0, world_size=1, config=QWEN3_0_6B, transport=transport) as publisher:
        publisher.attach_tensors(declared)
        print("{}", flush=True)
        for step in sys.stdin:
            cpu, began = time.process_time(), time.perf_counter()
            handle = publisher.publish_tensors(int(step), parts)
            took = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}
            handle.wait_ready(300)
            if handle.transport != transport:
                raise SystemExit(f"expected to publish over {transport}, got {handle.transport}: {handle.transport_reason}")
            print(json.dumps(took | {"ready": time.perf_counter() - began}), flush=True)


def _rounds(read: Callable[[], object]) -> None:
    print("{}", flush=True)
    for _ in sys.stdin:
        cpu, began = time.process_time(), time.perf_counter()
        read()
        print(json.dumps({"seconds": time.perf_counter() - began, "cpu": time.process_time() - cpu}), flush=True)


def cpu_of(pid: int) -> float:
    """CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    {"serve": serve, "plain": plain, "version": version, "source": source, "rank": rank}[sys.argv[1]](*sys.argv[2:])

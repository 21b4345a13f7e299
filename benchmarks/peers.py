"""Peers of publishing: the same bytes over plain TCP sockets, and a plain copy in memory."""

import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class TcpSender:
    """Connection of one rank to `receive`. `send` returns once the receiver has all bytes."""

    def __init__(self, port: int, size: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(size.to_bytes(8, "little"))

    def send(self, arrays: Sequence[Array]) -> None:
        for array in arrays:
            self._socket.sendall(array.reshape(-1).view(np.uint8).data)
        self._socket.recv(1)


def copy(targets: Sequence[Array], sources: Sequence[Array]) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def receive(ranks: int) -> None:
    """Receive the bytes of every rank repeatedly into the same memory, in a process of its own. Prints the port."""
    server = socket.create_server(("127.0.0.1", 0))
    print(server.getsockname()[1], flush=True)
    threads = [threading.Thread(target=_receive_from, args=(server.accept()[0],)) for _ in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _receive_from(connection: socket.socket) -> None:
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    buffer = memoryview(bytearray(size))
    while True:
        at = 0
        while at < size:
            got = connection.recv_into(buffer[at:], min(size - at, 1 << 20))
            if not got:
                return
            at += got
        connection.sendall(b"!")


if __name__ == "__main__":
    receive(int(sys.argv[1]))

"""A TCP proxy that can be cut."""

import contextlib
import socket
import threading
from collections.abc import Callable


class Proxy:
    """Forwards `endpoint` (`host:port`) to another. Cuts every connection once `cut_after` bytes have gone towards the daemon."""

    def __init__(self, target: str, cut_after: int = 0, on_cut: Callable[[], None] = lambda: None) -> None:
        host, _, port = target.rpartition(":")
        self._target, self._cut_after, self._on_cut = (host, int(port)), cut_after, on_cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock, self._closed = threading.Lock(), False
        self.forwarded, self.cuts = 0, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            self.cuts += 1
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            self._open.clear()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread within `accept` takes one more connection
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                with self._lock:
                    self._open += [client, server]
                    closed = self._closed
                if closed:
                    self.cut()
                    return
                threading.Thread(target=self._pump, args=(client, server, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, False), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
                if counted:
                    self.forwarded += len(data)
                    if self._cut_after and self.forwarded >= self._cut_after and not self.cuts:
                        self.cut()
                        self._on_cut()
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

"""The listener of the data port: one thread for each connection, bounded."""

import errno
import os
import socket
import ssl
import threading
from contextlib import suppress

import structlog
from resharder.server.data.connection import DataConnection, DataReads
from resharder.server.infra.addresses import parse_listen
from resharder.server.infra.descriptors import is_exhausted

MAX_CONNECTIONS = 256
_REFUSED = 4  # times as many connections in all, those that are refused with them
_SETTLED_SECONDS = 1.0  # of idleness until a connection gives way; a reader has a pause between two requests
_log = structlog.get_logger("resharder.data")


class DataPort:
    """Data port, which listens once constructed. Raises OSError if the address cannot be bound.

    At `most` connections, the one that has been idle longest is closed in favour of a new one. If all are in use, the first
    request of a new one is answered 503, over TLS too, and its reader comes again. Beyond four times as many, it is closed.
    """

    def __init__(
        self, host: str, port: int, reads: DataReads, tls: ssl.SSLContext | None = None, *, most: int = MAX_CONNECTIONS
    ) -> None:
        self._reads, self._tls, self._most = reads, tls, most
        self._lock, self._open = threading.Lock(), dict[DataConnection, threading.Thread]()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=most)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="data-port", daemon=True)
        self._accepting.start()

    @property
    def transfers(self) -> int:
        """Number of requests that are being answered."""
        with self._lock:
            return sum(connection.idle_since is None for connection in self._open)

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if is_exhausted(error):
                    _log.error("accept_failed", port=self.port, exc_info=error)
                threading.Event().wait(0.1)  # out of descriptors, for now
                continue
            with suppress(OSError):  # the peer is gone already
                self._admit(connected, address[0])

    def _admit(self, connected: socket.socket, peer: str) -> None:
        full = not self._has_place()
        if full and len(self._open) >= _REFUSED * self._most:
            connected.close()
            return
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is not None:
            connected = self._tls.wrap_socket(connected, server_side=True, do_handshake_on_connect=False)
        connection = DataConnection(connected, peer, self._reads, full=full)
        thread = threading.Thread(target=self._serve, args=(connection,), name="data", daemon=True)
        with self._lock:
            self._open[connection] = thread
        thread.start()

    def _has_place(self) -> bool:
        with self._lock:
            if sum(not connection.full for connection in self._open) < self._most:
                return True
            settled = self._reads.clock() - _SETTLED_SECONDS
            idle = [
                (since, connection)
                for connection in self._open
                if not connection.full and (since := connection.idle_since) is not None and since <= settled
            ]
            if not idle:
                return False
            oldest = min(idle, key=lambda found: found[0])[1]
            del self._open[oldest]
        oldest.close()
        return True

    def _serve(self, connection: DataConnection) -> None:
        try:
            connection.serve()
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def close(self) -> None:
        """Stop listening, end all connections, and wait for their threads."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join()
        with self._lock:
            open_ = dict(self._open)
        for connection in open_:
            connection.close()
        for thread in open_.values():
            thread.join(timeout=5)


def open_port(listen: str, reads: DataReads, tls: ssl.SSLContext | None, *, given: bool) -> DataPort:
    """Return a data port at host:port. Unless an operator has `given` the port, a free one takes the place of one that is taken.

    Raises OSError if the address cannot be bound.
    """
    host, port = parse_listen(listen)
    try:
        return DataPort(host, port, reads, tls)
    except OSError as error:
        if given or error.errno != errno.EADDRINUSE:
            raise
    opened = DataPort(host, 0, reads, tls)
    _log.warning("data_port_taken", wanted=listen, listen=f"{host}:{opened.port}", why=os.strerror(errno.EADDRINUSE))
    return opened

"""Measurement of one data port from this host: whether it answers, its certificate, the round trip, and its rate."""

import http.client
import random
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import number_pieces
from resharder.converters.wire.range_client import (
    BROKEN,
    CONNECT_SECONDS,
    Cut,
    DataAddress,
    PartRefused,
    PartRequest,
    PortBusy,
    RangeConnection,
    WrongBytes,
)
from resharder.converters.wire.ranges import PIECE_BYTES

LIMIT_BYTES, LIMIT_SECONDS = 64 << 20, 3.0
"""Bounds on each measurement of a rate."""
STREAMS = (1, 4)
_SILENT_SECONDS = 5.0
_ROUNDS = 5
_FIRST_BYTES = 256 << 10  # of a stream's first request, and four times as many in each further one
_MOST_REFUSED = 32  # pieces that are tried until the node holds one
_BUSY_SECONDS = 0.05
_NAME_CODES = (62, 64)  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
_LACKS = "does not hold piece"
_NO_PART = PartRequest("models/none/versions/0", "none", "none", 1, 0, 1)  # that no port has


class Problem(NamedTuple):
    """Problem of a link, and what to change."""

    found: str
    hint: str


class TlsOptions(NamedTuple):
    """Names of the options with which the measuring process has its certificates, for advice."""

    ca: str
    pair: str
    peer_name: str


_CLIENT = TlsOptions(
    "RESHARDER_TLS_CA",
    "RESHARDER_TLS_CERT and RESHARDER_TLS_KEY",
    "--node-tls-name, for nodes --tls-peer-name, for the daemon RESHARDER_TLS_NAME",
)


@dataclass(frozen=True)
class StreamRate:
    """Bytes received over a number of connections at once, and the time."""

    streams: int
    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class PortMeasurement:
    """Result for one port.

    Attributes:
        round_trip: Seconds of a request for one byte, else of a connection; None if there is no connection.
        rates: Rate of each number of streams; empty if no part can be read.
        problem: Reason for which it is not reached, or sends wrong bytes; None for none.
        unread: Reason for which no part can be read from a port that answers; empty if one can.
    """

    round_trip: float | None = None
    rates: tuple[StreamRate, ...] = ()
    problem: Problem | None = None
    unread: str = ""


def measure_port(
    address: DataAddress,
    parts: Sequence[PartRequest],
    limit_bytes: int = LIMIT_BYTES,
    limit_seconds: float = LIMIT_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    options: TlsOptions = _CLIENT,
) -> PortMeasurement:
    """Measure a data port.

    Args:
        address: The port.
        parts: Pieces that it may hold, each at most `PIECE_BYTES`.
        limit_bytes: Bound on the bytes of one measurement of a rate, exceeded by at most one piece of each stream.
        limit_seconds: Bound on its seconds, exceeded by at most the time of 1 MiB on one connection, or by 5 s of silence.
        options: Options that advice names.
    """
    address = replace(address, silent_seconds=min(_SILENT_SECONDS, address.silent_seconds))
    try:
        connected = min(_connect_seconds(address, clock) for _ in range(3))
    except BROKEN as error:
        closed = isinstance(error, ssl.SSLEOFError)
        return PortMeasurement(problem=_handshake(options) if closed else problem_of(error, address, options))
    try:
        _answers(address)
        held = _held(address, parts)
        if isinstance(held, str):
            return PortMeasurement(connected, unread=held)
        trip = _round_trip(address, held[0], clock)
        rates = tuple(_rate(address, held, streams, limit_bytes, limit_seconds, clock) for streams in STREAMS)
    except (*BROKEN, PartRefused, WrongBytes) as error:
        return PortMeasurement(connected, problem=problem_of(error, address, options))
    return PortMeasurement(trip, rates)


def parts_of(version: str, fingerprint: str, files: Sequence[FileLayout]) -> list[PartRequest]:
    """Return requests for all pieces of a version."""
    numbering, sizes = number_pieces(files), {file.path: file.size for file in files}
    spans = [part for piece in range(numbering.count) for part in numbering.parts(piece)]
    return [PartRequest(version, fingerprint, span.file, sizes[span.file], span.start, span.end) for span in spans]


def _connect_seconds(address: DataAddress, clock: Callable[[], float]) -> float:
    """Return the seconds of one connection, without its handshake, which is done too. Raises OSError (ssl.SSLError)."""
    began = clock()
    with socket.create_connection((address.host, address.port), CONNECT_SECONDS) as opened:
        seconds = clock() - began
        if address.tls_context is not None:
            address.tls_context().wrap_socket(opened, server_hostname=address.server_name or address.host).close()
    return seconds


def _answers(address: DataAddress) -> None:
    """Exchange a request, because a port refuses a client's certificate after the handshake. Raises `BROKEN`."""
    with suppress(PartRefused):
        _read_byte(address, _NO_PART)


def _held(address: DataAddress, parts: Sequence[PartRequest]) -> list[PartRequest] | str:
    """Return pieces that the port sends, or why it sends none. Raises `BROKEN`."""
    if not parts:
        return "no READY version to read"
    held: list[PartRequest] = []
    tried, refusal = random.sample(parts, min(len(parts), _MOST_REFUSED)), ""
    for part in tried:
        try:
            _read_byte(address, part)
        except PortBusy as error:
            refusal = str(error)
        except PartRefused as error:
            refusal = str(error)
            if _LACKS not in refusal:
                return refusal
        else:
            held.append(part)
    return held or refusal


def _read_byte(address: DataAddress, part: PartRequest) -> None:
    with closing(RangeConnection(address)) as connection:
        list(connection.blocks(replace(part, end=part.start + 1), np.empty(1, np.uint8)))


def _round_trip(address: DataAddress, part: PartRequest, clock: Callable[[], float]) -> float:
    """Return the median seconds of requests for one byte over an open connection."""
    byte, took = np.empty(1, np.uint8), list[float]()
    with closing(RangeConnection(address)) as connection:
        for _ in range(1 + _ROUNDS):
            began = clock()
            list(connection.blocks(replace(part, end=part.start + 1), byte))
            took.append(clock() - began)
    return statistics.median(took[1:])


class _Stream(threading.Thread):
    """One connection of a measurement; `received` counts its bytes, `failure` is its error."""

    def __init__(self, address: DataAddress, parts: Iterable[PartRequest], left: Callable[[], bool]) -> None:
        super().__init__(name="resharder-link", daemon=True)
        self._address, self._parts, self._left = address, parts, left
        self.received = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        buffer, most = np.empty(PIECE_BYTES, np.uint8), _FIRST_BYTES
        try:
            with closing(RangeConnection(self._address)) as connection:
                for whole in self._parts:
                    if not self._left():
                        return
                    part, most = replace(whole, end=min(whole.end, whole.start + most)), 4 * most
                    try:
                        for size in connection.blocks(part, buffer[: part.end - part.start]):
                            self.received += size
                            if not self._left():
                                return
                    except PortBusy:
                        time.sleep(_BUSY_SECONDS)
        except BaseException as error:
            self.failure = error


def _rate(
    address: DataAddress, parts: Sequence[PartRequest], streams: int, most: int, limit: float, clock: Callable[[], float]
) -> StreamRate:
    """Return the rate of some streams at once. Raises the first error of a stream."""
    began, ends = clock(), list[float]()

    def left() -> bool:
        ends.append(clock())
        return ends[-1] < began + limit and sum(thread.received for thread in threads) < most

    threads = [_Stream(address, _around(parts, first), left) for first in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failure := next((thread.failure for thread in threads if thread.failure), None):
        raise failure
    return StreamRate(streams, sum(thread.received for thread in threads), max(ends) - began)


def _around(parts: Sequence[PartRequest], first: int) -> Iterable[PartRequest]:
    """Yield the parts again and again, from position `first` on."""
    while True:
        yield parts[first % len(parts)]
        first += 1


# Errors


def _handshake(options: TlsOptions) -> Problem:
    return Problem("the port closed the connection during the TLS handshake", f"give it certificates, or unset {options.ca} here")


def _refused(options: TlsOptions) -> Problem:
    found = "it closes the connection, or refuses this client's certificate"
    return Problem(found, f"set {options.pair} to a pair of its authority")


def problem_of(error: BaseException, address: DataAddress, options: TlsOptions = _CLIENT) -> Problem:
    """Return an error of a connection as what was expected and what came, and what to change."""
    if isinstance(error, ssl.SSLError):
        return _tls_problem(error, address, options)
    if isinstance(error, WrongBytes):
        return Problem(str(error), "look for faulty memory on that host, this host, or between them")
    if isinstance(error, socket.gaierror):
        return Problem(f"the name {address.host} does not resolve here", "give an address that every host reaches: --address")
    if isinstance(error, TimeoutError):
        return Problem("no answer came in time", "open the port to this host in firewalls, or give another --address")
    if isinstance(error, ConnectionRefusedError):
        return Problem("connection refused", "start the process there, with a --listen and --address that other hosts reach")
    if isinstance(error, (ConnectionResetError, http.client.RemoteDisconnected, Cut)):
        if address.tls_context is not None:
            return _refused(options)
        hint = f"does it expect TLS? Set {options.ca}, {options.pair}"
        return Problem("the port closed the connection without an HTTP answer", hint)
    if isinstance(error, http.client.HTTPException):
        return Problem(
            f"expected HTTP, got {type(error).__name__}: {str(error)[:60]!r}", "is this the port of --data-listen or --listen?"
        )
    return Problem(str(error) or type(error).__name__, "check the address, the network and firewalls")


def _tls_problem(error: ssl.SSLError, address: DataAddress, options: TlsOptions) -> Problem:
    expected, reason = address.server_name or address.host, error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _NAME_CODES:
        return Problem(
            f"its certificate is for {', '.join(_names(address)) or 'no name'}, not for {expected}",
            f"issue one with that name, or pass the name in it: {options.peer_name}",
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return Problem(
            f"expected a valid certificate of the authority in {options.ca}, got: {error.verify_message}",
            "issue its certificate by that authority, or pass its authority",
        )
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason:
        return Problem("it does not speak TLS", _handshake(options).hint)
    if "ALERT" in reason or isinstance(error, ssl.SSLEOFError):
        return _refused(options)
    return Problem(f"TLS failed: {error.reason or error}", "compare the certificates of both sides")


def _names(address: DataAddress) -> list[str]:
    """Return the names in the certificate of a port, by another connection that compares none."""
    assert address.tls_context is not None
    context = address.tls_context()
    context.check_hostname = False
    with suppress(OSError), socket.create_connection((address.host, address.port), CONNECT_SECONDS) as opened:
        with context.wrap_socket(opened) as secured:
            found = secured.getpeercert() or {}
        return [str(pair[1]) for pair in found.get("subjectAltName", ())]
    return []

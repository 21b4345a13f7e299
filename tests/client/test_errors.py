"""The reasons that the daemon sends, the clients' types for them, and the table in docs/errors.md: they are one list."""

import ast
import re
from pathlib import Path
from typing import NamedTuple, get_args

import grpc
import pytest
import resharder.converters.errors as conversion
import resharder.server.state.errors as server
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from resharder.client import errors as client
from resharder.server.ingest.intake import CLOSED
from resharder.server.rpc.dispatch import DOMAIN

ROOT = Path(__file__).parents[2]
AT_START = {"STORE_FILESYSTEM", "STORE_IN_USE", "STORE_LOCKED", "STORE_OWNER"}
"""Said on standard error, before there is anybody to send them to."""


class Row(NamedTuple):
    status: str
    reason: str
    python: str


def documented() -> list[Row]:
    rows, status = [], ""
    for line in (ROOT / "docs/errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 4 or cells[0] in ("status", "---"):
            continue
        status = cells[0] or status
        rows += [Row(status, reason, cells[2].strip("`")) for reason in re.findall(r"`([A-Z_]+)`", cells[1])]
    return rows


def raised() -> set[tuple[str, str]]:
    """(status, reason) of every error that the daemon's sources make, and of those that its interceptor translates."""
    kinds = {kind.__name__: kind.code.name for kind in server.DaemonError.__subclasses__()}
    found = {("INTERNAL", "INTERNAL")}
    kinds_of_conversion = {conversion.ConversionError, *conversion.ConversionError.__subclasses__()}
    kinds_of_conversion -= {conversion.ReplicasDiffer}  # ranks find it among themselves
    found |= {("INVALID_ARGUMENT", kind.reason) for kind in kinds_of_conversion}
    nodes = [each for path in (ROOT / "server/resharder/server").rglob("*.py") for each in ast.walk(ast.parse(path.read_text()))]
    for node in nodes:
        if isinstance(node, ast.ClassDef) and node.bases and (base := ast.unparse(node.bases[0])) in kinds:
            kinds[node.name] = kinds[base]
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in kinds:
            found |= {(kinds[node.func.id], reason) for reason in _reasons(node.args[0])}
    return found


def _reasons(argument: ast.expr) -> list[str]:
    if isinstance(argument, ast.Constant):
        return [argument.value]
    assert ast.unparse(argument) == "CLOSED[record.state]", f"not a reason that can be read here: {ast.unparse(argument)}"
    return list(CLOSED.values())


def test_the_documented_reasons_are_exactly_those_that_the_daemon_sends() -> None:
    sent = {(status, reason) for status, reason in raised() if reason not in AT_START}
    rows = [(row.status, row.reason) for row in documented()]
    assert set(rows) == sent
    assert len(rows) == len(set(rows)), "a row twice"
    assert {reason for _, reason in raised()} >= AT_START
    assert all(f"`{reason}`" in (ROOT / "docs/errors.md").read_text() for reason in AT_START)


def test_every_reason_that_the_daemon_may_use_is_used() -> None:
    own = {"INTERNAL", "UNSUPPORTED_MODEL", "CONVERSION"}
    assert set(get_args(server.Reason)) == {reason for _, reason in raised()} - own


class Refusal(grpc.RpcError):
    def __init__(self, status: str, reason: str) -> None:
        self._status, self._details = grpc.StatusCode[status], any_pb2.Any()
        self._details.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN))

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "what was expected"

    def trailing_metadata(self) -> list[tuple[str, bytes]]:
        return [("grpc-status-details-bin", status_pb2.Status(details=[self._details]).SerializeToString())]


@pytest.mark.parametrize("row", documented(), ids=str)
def test_a_client_raises_the_documented_type_with_the_daemons_reason(row: Row) -> None:
    made = client.error_of(Refusal(row.status, row.reason), "daemon:1")
    assert (type(made).__name__, made.reason) == (row.python, row.reason)
    assert "what was expected" in str(made)


def test_a_client_translates_no_reason_that_nobody_sends() -> None:
    sent = {reason for _, reason in raised()}
    assert set(client._BY_REASON) | {client.TOO_MANY_UPLOADING, client.NO_VERSION, *client.UNREGISTERED} <= sent
    assert {client.OutOfRoom.reason, client.CorruptData.reason, client.LayoutRejected.reason, client.StaleEpoch.reason} <= sent


def test_the_trainers_page_names_every_error_that_a_trainer_can_get() -> None:
    page = (ROOT / "docs/reference/trainer.md").read_text()
    kinds = [client.ResharderError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    named = {kind.__name__ for kind in kinds if kind.__module__ == client.__name__}
    assert {
        name for name in named if f"`{name}`" not in page.replace("resharder.client.errors.ResharderError", "ResharderError")
    } == set()

"""A daemon whose names and reasons act on a terminal, and the commands that show them."""

import json
import threading
import unicodedata
from collections.abc import Iterator

import grpc
from google.protobuf.message import Message
from resharder.v1 import operator_pb2, resources_pb2

from tests.support.fake_operator import FakeOperator

NAME = "n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\nforged row\té→漢"
REASON = f"{NAME} [red]red[/red] [/] [link=x]\u2028\x00"
VERSION = f"models/{NAME}/versions/1"
COMMANDS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", "--wide"),
    ("fleets",),
    ("servers",),
    ("versions",),
    ("events",),
    ("nodes",),
    ("fleet", "show"),
    ("fleet", "set", NAME, "--want", "none"),
    ("fleet", "delete", NAME),
    ("update", "1", "--timeout", "0.1"),
    ("pin", "1"),
    ("rollback", "--reason", REASON),
    ("approve",),
    ("back",),
    ("sleep", "--fleet", NAME),
    ("wake",),
    ("drain",),
    ("resume",),
    ("forget", NAME),
    ("verify", NAME),
    ("profile", "install", NAME),
    ("drain-node", NAME),
    ("resume-node", NAME),
    ("archive", "1"),
    ("archived",),
    ("restore", "1"),
    ("gc", "--keep", "1", "--yes"),
    ("export", "1", "OUT"),
    ("fetch-config", NAME, "OUT"),
    ("import", "OUT"),
    ("doctor",),
    ("probe", "--server", NAME),
)


def command_id(command: tuple[str, ...]) -> str:
    return "-".join(word for word in command[:2] if word.isascii() and word.isprintable()) or "hostile"


class Hostile(FakeOperator):
    """A daemon whose every name and reason is another's hostile text."""

    def __init__(self) -> None:
        move = resources_pb2.Move(
            id=1, state="STOPPED", from_version=1, to_version=2, reason=REASON, servers=[NAME], failed={NAME: REASON}
        )
        fleet = resources_pb2.Fleet(
            name=NAME, model=NAME, wanted_version=1, servers=[NAME], settled_version=1, move=move, reason=REASON,
            refused=[resources_pb2.Refusal(version=3, reason=REASON)], returning=[NAME], serve_ahead_reason=REASON,
            strategy=resources_pb2.UpdateStrategy(kind="CANARY", check=NAME),
        )  # fmt: skip
        servers = [
            resources_pb2.Server(
                name=f"servers/{NAME}", fleet=NAME, model=NAME, state=state, version=2, wanted_version=1, reason=REASON,
                world_size=1, workers=[resources_pb2.Worker(state="FAILED", error=REASON)],
                install=resources_pb2.Install(version=1, error=REASON),
            )
            for state in ("LOST", "SERVING")
        ]  # fmt: skip
        super().__init__(fleet, servers=servers)
        self.versions = [
            resources_pb2.Version(
                name=VERSION,
                model=NAME,
                number=1,
                state=state,
                reason=REASON,
                job=NAME,
                size_bytes=1,
                used_by=[NAME],
            )
            for state in ("READY", "ABORTED")
        ]
        copies = [resources_pb2.NodeCopy(version=VERSION, problem=REASON)]
        self.nodes = [resources_pb2.Node(name=f"nodes/{NAME}", state="LIVE", copies=copies)]
        self.shortages = [operator_pb2.ReplicaShortage(version=NAME, problem=REASON)]
        self.retired = operator_pb2.RetireVersionsResponse(retired=self.versions[:1], kept=self.versions[:1])

    def GetDaemon(self, request: Message, context: grpc.ServicerContext) -> Message:
        publisher = resources_pb2.Publisher(
            name=f"models/{NAME}/publishers/1", model=NAME, job=NAME, state="ACTIVE", reason=REASON
        )
        return operator_pb2.Daemon(release=NAME, store_folder=NAME, models=[NAME], publishers=[publisher])

    def GetVersion(self, request: operator_pb2.GetVersionRequest, context: grpc.ServicerContext) -> Message:
        return self.versions[0]

    def ListEvents(self, request: operator_pb2.ListEventsRequest, context: grpc.ServicerContext) -> Iterator[Message]:
        asked = json.dumps({"fleet": {"target": {"kind": NAME}, "check": REASON}})
        for details in ({"request": asked}, {NAME: REASON}):
            yield operator_pb2.Event(id=1, kind=NAME, subject=NAME, what=NAME, reason=REASON, details=details)
        if request.follow:
            ended = threading.Event()
            context.add_callback(ended.set)
            ended.wait()

    def VerifyServer(self, request: Message, context: grpc.ServicerContext) -> Message:
        found = [resources_pb2.Verification(different=[NAME], different_tensors=2), resources_pb2.Verification(skipped=REASON)]
        return operator_pb2.VerifyServerResponse(verifications=found)

    def ProfileInstall(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        yield resources_pb2.Profile(error=REASON, table=f"a table\n{REASON.replace(chr(10), '')}")

    def ArchiveVersion(self, request: Message, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ArchivedVersion(version=VERSION, url=NAME)

    def ListArchive(self, request: Message, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ListArchiveResponse(versions=[operator_pb2.ArchivedVersion(version=VERSION, url=NAME)])

    def RestoreVersion(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self.versions[0]

    def DeleteFleet(self, request: Message, context: grpc.ServicerContext) -> Message:
        return context.abort(grpc.StatusCode.NOT_FOUND, REASON)

    def ForgetServer(self, request: Message, context: grpc.ServicerContext) -> Message:
        return operator_pb2.ForgetServerResponse()


def control_characters(text: str) -> set[str]:
    """Characters that act on a terminal instead of being shown; a line break ends a line of the command's own."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}

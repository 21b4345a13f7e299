"""What an answer keeps to itself: where weights lie, from those who may not read them, and other models, from those who are no
viewers. The messages are the answers' own, and changed in place."""

from collections.abc import Callable
from typing import Any

from resharder.v1 import operator_pb2, resources_pb2

Reads = Callable[[str], bool]
"""Whether the caller may read versions of this model."""


def redact(answer: Any, looks: bool, reads: Reads) -> None:
    if isinstance(answer, operator_pb2.Daemon):
        _redact_daemon(answer, looks, reads)
    elif isinstance(answer, operator_pb2.ListVersionsResponse):
        for version in answer.versions:
            _redact_version(version, reads)
    elif isinstance(answer, resources_pb2.Version):
        _redact_version(answer, reads)
    elif isinstance(answer, operator_pb2.ListServersResponse) and not looks:
        _keep(answer.servers, reads)
    elif isinstance(answer, operator_pb2.ListFleetsResponse) and not looks:
        _keep(answer.fleets, reads)


def _redact_version(version: resources_pb2.Version, reads: Reads) -> None:
    if not reads(version.model):
        version.ClearField("folder")


def _redact_daemon(daemon: operator_pb2.Daemon, looks: bool, reads: Reads) -> None:
    readable = {model for model in daemon.models if reads(model)}
    if not readable:
        daemon.ClearField("store")
        daemon.ClearField("store_folder")
    if not looks:
        daemon.models[:] = [model for model in daemon.models if model in readable]
        _keep(daemon.publishers, readable.__contains__)
    for publisher in daemon.publishers:
        if publisher.model not in readable:
            publisher.ClearField("store")


def _keep(messages: Any, reads: Reads) -> None:
    """Those of models that may be read."""
    kept = [message for message in messages if reads(message.model)]
    del messages[:]
    messages.extend(kept)

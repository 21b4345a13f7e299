"""Redaction of answers, in place.

Callers that may not read a model do not get the location of its weights. Callers without a viewer's role get no entries of models
that they may not read.
"""

from collections.abc import Callable
from typing import Any

from resharder.v1 import node_pb2, operator_pb2, resources_pb2

Reads = Callable[[str], bool]
"""Function of a model that returns whether the caller may read its versions."""


def redact(answer: Any, looks: bool, reads: Reads) -> None:
    """Redact an answer in place. `looks`: whether the caller has a viewer's role. Other messages are left as they are."""
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
    elif isinstance(answer, node_pb2.NodeOrders):
        _keep(answer.snapshots, reads)


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
    """Remove items of models that the caller may not read."""
    kept = [message for message in messages if reads(message.model)]
    del messages[:]
    messages.extend(kept)

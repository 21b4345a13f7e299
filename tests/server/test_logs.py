"""The daemon's log as JSON: each change of a state once, with its reason, and nothing for each chunk."""

import json
from collections import Counter

from resharder.client.operator import Operator
from resharder.v1 import publisher_pb2

from tests.support.daemon import Daemon
from tests.support.observing import wait_serving
from tests.support.populated_daemon import job, publish
from tests.support.simulated_server import SimulatedServer

CHUNK = 1024


def test_every_change_of_a_state_is_one_line_with_its_reason_and_no_chunk_is() -> None:
    with Daemon(log_format="json", chunk_bytes=CHUNK, keep_count=2) as daemon:
        told = job(daemon, "policy")
        publish(told, 1)
        with SimulatedServer(daemon, "a"), SimulatedServer(daemon, "b"), Operator(daemon.endpoint) as operator:
            version = publish(told, 2, 3)
            wait_serving(daemon, version.number)
            late = told.begin(4)
            told.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=late.name, epoch=told.epoch, reason="not\nthis one"))
            operator.rollback("policy", reason="too slow")
            wait_serving(daemon, 2)
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
        journal = [json.loads(line) for line in (daemon.store / "events.jsonl").read_text().splitlines()]
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    logged = Counter((line["event"], line.get("subject"), line.get("reason")) for line in lines)
    for event in journal:
        key = (f"{event['kind']}_{event['what']}", event["subject"], event["reason"])
        known = sum(1 for other in journal if (f"{other['kind']}_{other['what']}", other["subject"], other["reason"]) == key)
        assert logged[key] == known, key
    whats = {line["event"] for line in lines}
    wanted = {"publisher_created", "publisher_active", "version_created", "version_ready", "version_retired", "version_aborted"}
    assert wanted | {"server_serving", "server_applying", "move_moving", "move_done", "operator_rollback", "listening"} <= whats
    aborted = next(line for line in lines if line["event"] == "version_aborted")
    assert (aborted["level"], aborted["reason"], aborted["step"]) == ("warning", "not\nthis one", "4")
    chunks = version.size_bytes // CHUNK
    assert chunks > 4000
    assert len(lines) < 200, "what is said does not grow with the bytes"

"""The daemon's log: each change of a state once, with its reason, and nothing for each chunk. No text acts on a console."""

import io
import json
import re
import sys
import traceback
from collections import Counter
from contextlib import redirect_stderr

import pytest
import structlog
from resharder.client.operator import Operator
from resharder.converters.printable import printable_output
from resharder.server.infra.event_log import Event
from resharder.server.logs import configure_logs, log_event
from resharder.v1 import publisher_pb2

from tests.support.daemon import Daemon
from tests.support.hostile_operator import NAME, REASON, control_characters
from tests.support.observing import wait_serving
from tests.support.populated_daemon import job, publish
from tests.support.simulated_server import SimulatedServer

CHUNK = 4096


def test_every_change_of_a_state_is_one_line_with_its_reason_and_no_chunk_is() -> None:
    with Daemon(log_format="json", chunk_bytes=CHUNK, keep_count=2) as daemon:
        trainer = job(daemon, "policy")
        publish(trainer, 1)
        with SimulatedServer(daemon, "a"), SimulatedServer(daemon, "b"), Operator(daemon.endpoint) as operator:
            version = publish(trainer, 2, 3)
            wait_serving(daemon, version.number)
            late = trainer.begin(4)
            trainer.stub.AbortVersion(
                publisher_pb2.AbortVersionRequest(version=late.name, epoch=trainer.epoch, reason="not\nthis one")
            )
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
    assert chunks > 1000
    assert len(lines) < 200, "what is said does not grow with the bytes"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_no_text_of_others_acts_on_the_console_tracebacks_included(encoding: str) -> None:
    written = io.BytesIO()
    stderr = io.TextIOWrapper(written, encoding, write_through=True)
    with redirect_stderr(stderr), printable_output("resharderd"):
        configure_logs("console", "info")
        log_event(Event(1, 0.0, NAME, NAME, NAME, REASON, {NAME: REASON}))
        try:
            raise ValueError(REASON)
        except ValueError as error:
            structlog.get_logger().error("leases_failed", exc_info=error, given=error, values=[REASON])
            traceback.print_exc()
        sys.stderr.write(f"{NAME}\n")
    structlog.reset_defaults()
    stderr.flush()
    log = written.getvalue().decode(encoding)
    assert not control_characters(log), log
    assert r"n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\nforged row\t" in log
    assert "Traceback (most recent call last)" in log
    events = [line for line in log.split("\n") if re.match(r"\S+Z \[", line)]
    assert len(events) == 2, log


def test_a_job_whose_id_has_escape_sequences_does_not_act_on_the_daemons_console() -> None:
    with Daemon(log_format="console") as daemon:
        hostile = job(daemon, "policy", NAME.replace("\r\n", " "))
        version = hostile.begin(1)
        hostile.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=version.name, epoch=hostile.epoch, reason=REASON))
        assert daemon.stop() == 0
        log = daemon.log.read_bytes().decode()
    assert "x1b[2J" in log
    assert not control_characters(log), log
    assert not [line for line in log.split("\n") if line.startswith("forged")]

"""Rank processes that are stopped for longer than their lease, or replaced: the versions concerned are lost, and nothing else."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.models import equal, exported, weights
from tests.support.daemon import Daemon
from tests.support.observing import versions, wait_until

RANK = """
import sys
from resharder.client.errors import ResharderError
from resharder.client.trainer.connect import connect
from tests.client.models import CONFIG, declared, parts, spread, weights
endpoint, rank, transport = sys.argv[1], int(sys.argv[2]), sys.argv[3]
options = dict(config=CONFIG, transport=transport, staging_timeout=60.0)
publisher = connect(endpoint, model="policy", job="stalls", rank=rank, world_size=2, **options)
publisher.attach_tensors(declared(spread(2)[rank]))
print("attached", flush=True)
for line in sys.stdin:
    step = int(line)
    try:
        print(publisher.publish_tensors(step, parts(weights(step), spread(2)[rank])).version, flush=True)
    except ResharderError as error:
        print(type(error).__name__, flush=True)
"""


class Rank:
    """A trainer rank in a process of its own that publishes the steps it is given."""

    def __init__(self, daemon: Daemon, rank: int, transport: str) -> None:
        command = [sys.executable, "-c", RANK, daemon.endpoint, str(rank), transport]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def publish(self, step: int) -> str:
        """The version's number, or the name of the error."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("transport", ["shared-memory", "grpc"])
def test_a_rank_that_is_stopped_twice_costs_two_versions_and_nothing_else(transport: str, tmp_path: Path) -> None:
    with Daemon(lease_seconds=8) as daemon:
        ranks = [Rank(daemon, rank, transport) for rank in range(2)]
        try:
            assert [rank.answer() for rank in ranks] == ["attached"] * 2
            for step in (1, 2):
                ranks[1].process.send_signal(signal.SIGSTOP)
                number = int(ranks[0].publish(step))
                wait_until(lambda number=number: versions(daemon)[number] == "ABORTED", "the lease ends")  # type: ignore[misc]
                ranks[1].process.send_signal(signal.SIGCONT)
                assert ranks[1].publish(step) == "VersionAborted"
                assert "UPLOADING" not in versions(daemon).values()
            for step in (3, 4):
                first, second = (rank.publish(step) for rank in ranks)
                assert first == second
                wait_until(lambda first=first: versions(daemon)[int(first)] == "READY", f"step {step}")  # type: ignore[misc]
        finally:
            for rank in ranks:
                rank.close()
        assert sorted(versions(daemon).values()) == ["ABORTED", "ABORTED", "READY", "READY"]
        assert equal(exported(daemon.endpoint, "latest", tmp_path / "out"), weights(4))


def test_a_job_that_restarts_at_an_earlier_step_has_the_places_of_its_former_processes() -> None:
    with Daemon() as daemon:
        ranks = [Rank(daemon, rank, "auto") for rank in range(2)]
        try:
            assert [rank.answer() for rank in ranks] == ["attached"] * 2
            left = [int(ranks[0].publish(step)) for step in (7, 8)]
            for rank in ranks:
                rank.close()
            ranks = [Rank(daemon, rank, "auto") for rank in range(2)]
            assert [rank.answer() for rank in ranks] == ["attached"] * 2
            for step in (5, 6, 7, 8):
                first, second = (rank.publish(step) for rank in ranks)
                assert first == second
                wait_until(lambda first=first: versions(daemon)[int(first)] == "READY", f"step {step}")  # type: ignore[misc]
        finally:
            for rank in ranks:
                rank.close()
        assert [versions(daemon)[number] for number in left] == ["ABORTED"] * 2

"""A worker that fails or dies while an adapter is switched: afterwards a version is served whole, under its own label."""

import contextlib
import http.client
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.adapter_server import ADAPTER, AdapterSite
from tests.support.observing import wait_until

pytestmark = pytest.mark.full
SERVER = f"faulty-{os.getpid()}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterSite]:
    folder = tmp_path_factory.mktemp("faults")
    faults = {"FAULTY_ADAPTERS": str(folder / "fault")}
    with AdapterSite(folder, args=["--tensor-parallel-size", "2"], environment=faults, lease=15) as running:
        running.publish(0)
        yield running


@pytest.fixture(autouse=True)
def stopped(site: AdapterSite) -> Iterator[None]:
    """Stop a test's server, also if it fails, so that the next test starts its own."""
    yield
    if SERVER in site.servers:
        site.servers[SERVER].kill()


@dataclass
class Client:
    """Asks a server all the time."""

    site: AdapterSite
    answers: list[tuple[float, int, str, list[int]]] = field(default_factory=list)
    """(time, status, label, tokens) of each answer."""

    def __post_init__(self) -> None:
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._run)

    def __enter__(self) -> "Client":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.01):
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer = self.site.ask(SERVER, timeout=10)  # vLLM waits for connections whose requests its engine had
                tokens = answer.json()["choices"][0]["token_ids"] if answer.status == 200 else []
                self.answers.append((time.monotonic(), answer.status, str(answer.version), tokens))

    def wrong(self) -> list[object]:
        """Answers whose tokens are not those of their label."""
        return [each for each in self.answers if each[1] == 200 and not self.site.is_right(*each[2:])]


POINTS = ("reserve", "write", "proven", "enter", "entered", "release")


@pytest.mark.parametrize("point", POINTS)
def test_after_a_worker_was_killed_the_next_life_of_its_server_serves_the_version_whole(
    site: AdapterSite, point: str, tmp_path: Path
) -> None:
    mark, nth = tmp_path / "mark", 1 if point == "release" else 2
    fault = {"RESHARDER_FAILPOINT": f"worker.adapter.{point}@{nth}=kill", "RESHARDER_FAILPOINT_MARK": str(mark)}
    server = site.serve(SERVER, **fault)
    wait_until(lambda: site.versions()[0] > 0, "the last version serves", 60)
    before = site.versions()[0]
    with Client(site) as client:
        wait_until(lambda: bool(client.answers), "the first answer", 60)
        number = site.publish(before % 3)
        wait_until(lambda: not server.alive, "the server ends with its worker", 90)
    assert mark.exists()
    assert client.wrong() == []
    server.kill()
    site.serve(SERVER)
    site.wait_versions(number)
    label, tokens = site.answer(SERVER)
    assert label == f"1;{ADAPTER}={number}"
    assert site.is_right(label, tokens)
    assert sorted(each.name for each in site.operator.servers()) == [f"servers/{SERVER}", f"servers/{SERVER}.{ADAPTER}"]
    assert len(list(Path("/dev/shm").glob(f"resharder-page-{SERVER}-*"))) == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_version_that_one_of_two_workers_cannot_enter_gives_way_to_the_one_before(site: AdapterSite, rank: int) -> None:
    site.serve(SERVER)
    before = site.publish(0)
    site.wait_versions(before)
    fault = site.folder / "fault"
    fault.write_text(f"{rank} {before + 1}")
    with Client(site) as client:
        assert site.publish(1) == before + 1
        wait_until(lambda: "could not be installed" in site.state(SERVER).reason, "it is given up", 120)
        wait_until(lambda: len(client.answers) > 50 and {answer[1] for answer in client.answers[-20:]} == {200}, "it is back", 60)
    assert client.wrong() == []
    label, tokens = site.answer(SERVER)
    assert (label, site.is_right(label, tokens)) == (f"1;{ADAPTER}={before}", True)
    refused = [at for at, status, *_ in client.answers if status != 200]
    print(f"refused for {refused[-1] - refused[0] if refused else 0:.2f} s")
    fault.unlink()
    number = site.publish(2)
    site.wait_versions(number)
    label, tokens = site.answer(SERVER)
    assert (label, site.is_right(label, tokens)) == (f"1;{ADAPTER}={number}", True)

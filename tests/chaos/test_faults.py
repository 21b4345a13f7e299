"""When the death of a node takes place."""

import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from resharder.client.operator.answers import Version

from tests.chaos.faults import Faults
from tests.chaos.history import History
from tests.chaos.system import System
from tests.support.observing import wait_until

KILL = {"node": "far", "down": 2.0, "failpoint": "node.sync@1=kill", "small": True, "alone": True}


class Signals:
    """The part of `System` that the death of a node uses. `folder`: of the READY version; empty while the daemon lacks pieces."""

    def __init__(self) -> None:
        self.sent, self.heals, self.folder = list[Any](), 0, "/store"
        self.nodes = {"far": SimpleNamespace(processes=lambda: ["far"], failpoint="", small=False)}
        self.keepers = {"far": SimpleNamespace(down_until=0.0)}
        self.observer = SimpleNamespace(versions=lambda model: [SimpleNamespace(state=Version.State.READY, folder=self.folder)])

    def signal(self, processes: list[str], number: signal.Signals) -> None:
        self.sent.append((processes, number))


def killing(system: Signals, tmp_path: Path) -> threading.Thread:
    thread = threading.Thread(target=Faults(cast(System, system), History(tmp_path / "history")).inject, args=("node.kill", KILL))
    thread.start()
    time.sleep(0.3)
    assert not system.sent, "the daemon has all pieces"
    return thread


def test_a_node_dies_once_the_daemon_lacks_pieces_of_a_ready_version(tmp_path: Path) -> None:
    system = Signals()
    thread = killing(system, tmp_path)
    system.folder = ""
    thread.join(60)
    assert system.sent == [(["far"], signal.SIGKILL)]
    assert (system.nodes["far"].failpoint, system.nodes["far"].small) == ("node.sync@1=kill", True)


def test_a_node_does_not_die_after_the_storm(tmp_path: Path) -> None:
    system = Signals()
    thread = killing(system, tmp_path)
    system.heals, system.folder = 1, ""
    thread.join(60)
    assert not system.sent
    assert not system.nodes["far"].failpoint


def test_a_node_that_ranks_write_on_is_killed_for_good_while_it_alone_has_a_version(tmp_path: Path) -> None:
    system, history = Signals(), History(tmp_path / "history")
    silent = list[tuple[str, bool]]()
    system.proxies = SimpleNamespace(silence=lambda link, silent_=True: silent.append((link, silent_)))  # type: ignore[attr-defined]
    thread = threading.Thread(
        target=Faults(cast(System, system), history).inject, args=("node.gone", {"nodes": ["far"], "down": 3600.0})
    )
    thread.start()
    wait_until(lambda: bool(silent))
    time.sleep(0.1)
    assert (system.sent, silent) == ([], [("far-data", True)]), "no version is written there"
    home = SimpleNamespace(node="nodes/far")
    version = SimpleNamespace(state=Version.State.UPLOADING, folder="/staging", homes=[home], number=3)
    system.observer.versions = lambda model: [version]
    thread.join(60)
    assert system.sent == [(["far"], signal.SIGKILL)]
    assert system.keepers["far"].down_until > 3500
    assert silent[1:] == [("far-data", False)]
    assert [event["versions"] for event in history.events if event["kind"] == "alone"] == [[3]]

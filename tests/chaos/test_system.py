"""When a server counts as booted, and what makes a process one of another host."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.kept_server import answers, booted
from tests.support.hidden import hiding, unavailable
from tests.support.vllm_server import Response

REASON = unavailable()


def refused(reason: str) -> Response:
    return Response(503, {}, f'{{"error": {{"message": "not serving: {reason}", "code": 503}}}}'.encode())


@pytest.mark.parametrize(
    "reason", ["an operator put the server to sleep", "an operator put it to sleep", "drained for maintenance"]
)
def test_a_server_that_an_operator_holds_has_booted(reason: str) -> None:
    assert booted(refused(reason))


@pytest.mark.parametrize("reason", ["no version is confirmed yet", "its version is not confirmed yet", "the lease ended"])
def test_a_server_without_a_confirmed_version_has_not_booted(reason: str) -> None:
    assert not booted(refused(reason))


def test_a_server_that_serves_has_booted() -> None:
    assert booted(Response(200, {}, b""))
    assert not booted(Response(500, {}, b""))


def test_a_server_whose_engine_is_dead_does_not_answer() -> None:
    assert not answers(Response(503, {}, b""))
    assert answers(refused("the lease ended"))
    assert answers(Response(200, {}, b""))


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_process_sees_no_hidden_folder_and_takes_the_place_of_its_command(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        folder.mkdir()
        (folder / "nonce").write_bytes(b"1234")
    look = "import os, sys; print(os.getpid(), [os.listdir(folder) for folder in sys.argv[1:]])"
    command = [*hiding([other]), sys.executable, "-c", look, str(own), str(other)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0].strip() == f"{process.pid} [['nonce'], []]"
    assert (other / "nonce").exists()


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_process_from_which_a_folder_cannot_be_hidden_does_not_start(tmp_path: Path) -> None:
    done = subprocess.run([*hiding([tmp_path / "none", tmp_path]), "echo", "started"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "started" not in done.stdout

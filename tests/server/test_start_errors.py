"""A daemon that cannot start says why in one line that names the option; no library's words are in it."""

import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forked import Ended, run
from tests.support.secure import Authority


def file_as_store(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--store", str(folder / "file")]


def below_a_file(folder: Path) -> list[str]:
    (folder / "file").touch()
    return ["--store", str(folder / "file" / "store")]


def missing_key(folder: Path) -> list[str]:
    authority = Authority(folder / "pki")
    (folder / "pki" / "daemon.key").unlink()
    security = f"security: {{certificate: {authority.folder}/daemon.pem, key: {authority.folder}/daemon.key, "
    (folder / "daemon.yaml").write_text(security + f"client_ca: {authority.folder}/ca.pem, roles: {{'dns:a': [operator]}}}}\n")
    return ["--config", str(folder / "daemon.yaml")]


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a file as store": (file_as_store, "--store: .*/file is a file, not a folder"),
    "a store below a file": (below_a_file, "--store: .*/file is a file, not a folder"),
    "a folder that cannot be made": (lambda _: ["--store", "/proc/nowhere/store"], "--store: "),
    "no address": (lambda _: ["--listen", "nonsense"], "--listen: expected host:port, got 'nonsense'"),
    "an address of another host": (
        lambda _: ["--listen", "203.0.113.1:7677", "--insecure"],
        "--listen: cannot listen on 203.0.113.1:7677: Cannot assign requested address",
    ),
    "a name that does not resolve": (
        lambda _: ["--listen", "no-such-host.invalid:7", "--insecure"],
        "--listen: cannot listen on no-such-host.invalid:7: ",
    ),
    "a missing key": (missing_key, "security: "),
    "a port that there is not": (
        lambda _: ["--listen", "127.0.0.1:99999"],
        "--listen: expected host:port, got '127.0.0.1:99999'",
    ),
    "a missing file": (lambda folder: ["--config", str(folder / "none.yaml")], "--config: there is no file .*/none.yaml"),
    "no option": (lambda _: ["--keep-count", "0"], "--keep-count: expected greater than or equal to 1, got 0"),
}


def started(*arguments: str, store: Path) -> Ended:
    return run("resharder.server.main", "--store", str(store), "--web-listen", "", "--listen", "127.0.0.1:0", *arguments)


@pytest.mark.parametrize("case", CASES)
def test_a_daemon_that_cannot_start_names_the_option_in_one_line(case: str, tmp_path: Path) -> None:
    arguments, message = CASES[case]
    ended = started(*arguments(tmp_path), store=tmp_path / "store")
    assert ended.returncode in (1, 2)
    assert re.match(f"resharderd: {message}", ended.output), ended.output
    assert ended.output.count("\n") == 1


@pytest.mark.parametrize("option", ["--listen", "--web-listen", "--data-listen"])
def test_a_port_in_use_is_said_with_its_option(option: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = started(option, listen, store=tmp_path / "store")
    assert ended.returncode == 2
    assert ended.output == f"resharderd: {option}: cannot listen on {listen}: Address already in use\n"

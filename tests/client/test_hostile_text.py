"""What callers wrote, on an operator's terminal: no command lets a name or a reason act on it, in any encoding."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resharder.client.cli import complete

from tests.support.command import resharder
from tests.support.fake_operator import FakeOperator
from tests.support.hostile_operator import COMMANDS, NAME, REASON, Hostile, command_id, control_characters
from tests.support.terminal import on_terminal

ENCODINGS = ("utf-8", "latin-1", "ascii")
LOCAL: tuple[tuple[str, ...], ...] = (
    (),
    ("--help",),
    ("gc", "--help"),
    ("fleet", "set", "--help"),
    ("architectures",),
    ("check", NAME),
    ("import", NAME),
    ("versions", "--endpoint", NAME),
    (NAME,),
    ("status", f"--{NAME}"),
    ("probe", "--url", NAME),
    ("status", "\udcff\ud800"),
    ("fetch-config", "\udcff", "\udcff"),
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeOperator]:
    with Hostile() as fake:
        yield fake


def harmless(done: Any) -> bool:
    assert "Traceback" not in done.err, done.err
    for text in (done.out, done.err):
        assert not control_characters(text), text
        assert not [line for line in text.split("\n") if line.startswith("forged")], text
    return True


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", COMMANDS, ids=command_id)
def test_no_name_or_reason_of_the_daemon_acts_on_the_terminal(
    daemon: Hostile, command: tuple[str, ...], encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = resharder(*command, "--endpoint", daemon.endpoint, encoding=encoding)
    assert harmless(done)
    assert done.out or done.err, "something is said"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", LOCAL, ids=command_id)
def test_no_argument_acts_on_the_terminal(command: tuple[str, ...], encoding: str) -> None:
    assert harmless(resharder(*command, encoding=encoding))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_name_is_shown_with_its_characters_escaped_and_its_markup_as_it_is(daemon: Hostile, encoding: str) -> None:
    output = resharder("status", "--endpoint", daemon.endpoint, encoding=encoding).out
    assert r"n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\r\nforged row\t" in output
    assert "[red]red[/red] [/] [link=x]" in output
    assert {"utf-8": "é→漢", "latin-1": r"é>\u6f22", "ascii": r"\xe9>\u6f22"}[encoding] in output


@pytest.mark.parametrize("command", [("status",), ("versions",), ("events",), ("nodes",)])
def test_json_has_the_texts_themselves(daemon: Hostile, command: tuple[str, ...]) -> None:
    for encoding in ENCODINGS:
        done = resharder(*command, "--endpoint", daemon.endpoint, "--json", encoding=encoding)
        assert done.out.isascii()
        found = [json.loads(line) for line in done.out.splitlines()] if command == ("events",) else [json.loads(done.out)]
        assert REASON in str_values(found)


def test_a_name_that_acts_is_not_offered_to_the_shell(daemon: Hostile) -> None:
    context: Any = SimpleNamespace(params={"endpoint": daemon.endpoint})
    for names in (complete.fleets, complete.models, complete.servers, complete.nodes):
        assert names(context, "") == []
    assert complete.versions(context, "") == ["latest", "1"]


def str_values(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {text for child in children for text in str_values(child)}


@pytest.mark.parametrize(("environment", "encoding"), [({}, "utf-8"), ({"PYTHONIOENCODING": "ascii"}, "ascii")])
def test_on_a_terminal_the_only_escape_sequences_are_the_commands_own_colours(
    daemon: Hostile, environment: dict[str, str], encoding: str
) -> None:
    seen = on_terminal("status", "--endpoint", daemon.endpoint, environment=environment)
    assert seen.code == 0
    assert "\x1b[" in seen.text, "it has colours"
    assert not control_characters("\n".join(seen.lines))
    seen.text.encode(encoding)
    assert all(len(line) <= 80 for line in seen.lines), "columns are measured with what is shown"

"""The page that workers write and API servers read, and the labels that answers get from it."""

import asyncio
import json
import multiprocessing
import os
from pathlib import Path

import pytest
from resharder.client.inference import version_page as pages
from resharder.client.inference.control.labels import Answer, EventLabeller, Label, Signed, answering, current
from resharder.client.inference.version_page import Page, joined


def test_a_time_maps_to_the_version_that_all_workers_had_then(tmp_path: Path) -> None:
    now = [1.0]
    page, reader = (Page(tmp_path / "page", clock=lambda: now[0]) for _ in range(2))
    for at, rank, version in [(1, 0, 0), (1, 1, 0), (2, 0, 11), (3, 1, 11), (5, 0, 0), (6, 0, 12), (6.5, 1, 0), (7, 1, 12)]:
        now[0] = at
        page.write(rank, version)
    found = [reader.read().between(at, at) for at in (0.5, 2.5, 3.0, 4.9, 5.0, 6.2, 6.9, 7.0, 99.0)]
    assert found == [(0,), (0,), (11,), (11,), (0,), (0,), (0,), (12,), (12,)]
    assert reader.read().between(4, 8) == (11, 0, 12)
    assert reader.version == 12


def test_a_page_of_which_a_part_was_overwritten_names_no_version_any_more(tmp_path: Path) -> None:
    page, reader = Page(tmp_path / "page"), Page(tmp_path / "page")
    page.write(0, 11)
    assert reader.version == 11
    with (tmp_path / "page").open("r+b") as file:
        file.seek(20)
        file.write(b"#")
        file.seek(0)
        file.write(b"\x07")
    assert (reader.version, Page(tmp_path / "page").version) == (0, 0)
    page.write(0, 12)
    assert reader.version == 0


def write_many(path: Path, rank: int, versions: range) -> None:
    page = Page(path)
    for version in versions:
        page.write(rank, version)


def test_readers_beside_two_writing_processes_see_every_page_whole(tmp_path: Path) -> None:
    path = tmp_path / "page"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(path, rank, range(1, 2001))) for rank in range(2)]
    for writer in writers:
        writer.start()
    reader, seen = Page(path), []
    while any(writer.is_alive() for writer in writers):
        journal = reader.read()
        assert (-1, 0) not in journal.ranks, "a page in the middle of a write is read again"
        seen.append(dict(journal.ranks))
    for rank in range(2):
        numbers = [ranks.get(rank, 0) for ranks in seen]
        assert numbers == sorted(numbers)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert dict(reader.read().ranks) == {0: 2000, 1: 2000}


def test_processes_of_a_server_share_a_page_another_server_gets_its_own_and_dead_ones_are_removed(tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    path = pages.provide("a", environment, tmp_path)
    assert path is not None
    assert pages.provide("a", environment, tmp_path) is None
    used = Page(path)
    (tmp_path / f"{path.name[:-1]}-").touch()
    other = pages.provide("a-b", environment, tmp_path)
    assert other is not None
    assert list(tmp_path.iterdir()) == [path], "no process uses the other one"
    used.close()
    assert pages.provide("a", environment, tmp_path) not in (None, path)
    assert not path.exists()


EVENTS = b'event: x\r\ndata: {"a": 1}\r\n\r\n: data: {\ndata:{}\n\ndata: {"t": "\\ndata: {"}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(EVENTS) + 1))
def test_events_are_labelled_wherever_the_stream_is_split(size: int) -> None:
    events, chunks = EventLabeller(), [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
    found = b"".join(events.feed(chunk, Label((11, 12)), last=chunk is chunks[-1]) for chunk in chunks)
    label = b'"resharder_versions": "11,12"'
    expected = EVENTS.replace(b'{"a"', b"{" + label + b', "a"').replace(b"{}", b"{" + label + b"}")
    expected = expected.replace(b"data:{", b"data: {").replace(b'{"t"', b"{" + label + b', "t"')
    assert found == expected
    parsed = [json.loads(line[6:]) for line in found.splitlines() if line.startswith(b"data: {")]
    assert [event["resharder_versions"] for event in parsed] == ["11,12"] * 3


def test_an_event_names_what_the_sending_task_took_last_and_all_that_other_tasks_took() -> None:
    async def scenario() -> None:
        answer = Answer()
        assert not answer.sent()
        answer.sends_from_here()
        answer.took(1, Label((11,)))
        assert (answer.sent(), answer.sent()) == (Label((11,)), Label((11,)))
        answer.took(1, Label((12,)))
        assert answer.sent() == Label((12,))
        answer.took(1, Label((13,)))
        answer.took(1, Label((14,)))
        assert answer.sent() == Label((13, 14)), "nothing was sent in between"

        async def elsewhere(source: int, version: int) -> None:
            answer.took(source, Label((version,)))

        await asyncio.create_task(elsewhere(2, 14))
        await asyncio.create_task(elsewhere(3, 15))
        await asyncio.create_task(elsewhere(2, 16))
        assert answer.sent() == Label((13, 14, 15, 16))

    asyncio.run(scenario())


def test_a_whole_answer_names_the_versions_of_all_requests_to_the_engine_that_it_took() -> None:
    sent: list[dict[str, object]] = []

    async def send(message):  # type: ignore[no-untyped-def]
        sent.append(message)

    async def request(*versions: int) -> None:
        answer = current()
        assert answer is not None
        answer.made(Label(versions))

    async def scenario(*requests: tuple[int, ...]) -> bytes:
        sent.clear()
        with answering() as answer:
            signed = Signed(send, answer, lambda: 7)
            for versions in requests:
                await asyncio.create_task(request(*versions))
            await signed({"type": "http.response.start", "status": 200, "headers": []})
            assert sent == []
            await signed({"type": "http.response.body", "body": b"{}"})
        return dict(sent[0]["headers"])[b"x-resharder-version"]  # type: ignore[call-overload,no-any-return]

    assert asyncio.run(scenario((11,), (11, 12), (12,))) == b"11,12"
    assert asyncio.run(scenario((12,), (11,), (0,))) == b"12,11,none"
    assert asyncio.run(scenario()) == b"7"
    assert current() is None


def test_a_label_names_each_version_of_an_adapter_once_beside_those_of_the_base() -> None:
    parts = [Label((8,), (("a", version),)) for version in (3, 4, 3, 4)] + [Label((9,), (("b", 0),))]
    assert str(sum(parts, start=Label())) == "8,9;a=3,4;b=none"
    assert str(Label((0,))) == "none"
    events = EventLabeller()
    assert events.feed(b'data: {"a": 1}', parts[0]) == b""
    assert events.feed(b"\n", parts[1], last=True) == b'data: {"resharder_versions": "8;a=3,4", "a": 1}\n'


def test_repetitions_are_joined() -> None:
    assert joined((11, 11), [11, 12], (12, 11)) == (11, 12, 11)


def test_a_page_is_private_to_its_user(tmp_path: Path) -> None:
    Page(tmp_path / "page")
    assert os.stat(tmp_path / "page").st_mode & 0o777 == 0o600

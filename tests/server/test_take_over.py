"""Two daemons over one registry: the one with the higher term counts, and the other one ends and is not believed."""

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from resharder.client.errors import DaemonUnreachable
from resharder.client.operator.operator import Operator
from resharder.client.rpc.channel import Channel
from resharder.client.rpc.daemon_channel import DaemonChannel, DaemonReplaced
from resharder.converters.geometry.layout import TensorSpec
from resharder.converters.wire.term import NewestTerms, Term, parse_term, term_of
from resharder.server.standby.tenure import REPLACED_STATUS, Tenure, begin_term, raise_term, read_term
from resharder.server.state.errors import Unavailable
from resharder.v1 import operator_pb2, operator_pb2_grpc

from tests.client.proxy import Proxy
from tests.support.daemon import Daemon
from tests.support.node import Node, wait_live
from tests.support.observing import wait_until
from tests.support.publishing import Job, random_weights, read_folder, whole

SPECS = [TensorSpec("embed", "BF16", (96, 40)), TensorSpec("norm", "F32", (40,))]
REGISTRY, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def older() -> Iterator[Daemon]:
    with closing(Daemon(chunk_bytes=1024)) as daemon:
        yield daemon.start()


def standby(store: Path, **options: object) -> Daemon:
    return Daemon(store=store, chunk_bytes=1024, **options)


def copied(daemon: Daemon, folder: Path) -> Path:
    """A copy of a daemon's store, as a backup elsewhere would be: the daemon does not see what happens to it."""
    shutil.copytree(daemon.store, folder, ignore=shutil.ignore_patterns("pool", "staging", "retired", "*.part"))
    return folder


def test_a_term_is_read_as_it_is_written_and_nothing_else_is_one() -> None:
    assert parse_term(str(Term(REGISTRY, 7))) == Term(REGISTRY, 7)
    assert not any(parse_term(text) for text in ("", REGISTRY, f"{REGISTRY}/0", f"{REGISTRY}/-1", f"{REGISTRY}/1 ", "x/1", "1"))
    assert term_of(Term(REGISTRY, 7).metadata()) == Term(REGISTRY, 7)
    assert term_of((("resharder-term", b"1"), ("other", str(Term(REGISTRY, 7))))) is None
    assert Term(REGISTRY, 2).replaces(Term(REGISTRY, 1))
    assert not Term(REGISTRY, 1).replaces(Term(REGISTRY, 1))
    assert not Term(OTHER, 2).replaces(Term(REGISTRY, 1))


def test_the_newest_term_of_each_registry_is_remembered() -> None:
    seen = NewestTerms()
    assert seen.newest(REGISTRY) is None
    for number, newest in ((1, 1), (3, 3), (2, 3), (3, 3)):
        assert seen.see(Term(REGISTRY, number)) == Term(REGISTRY, newest)
    assert seen.see(Term(OTHER, 1)) == Term(OTHER, 1)
    assert seen.newest(REGISTRY) == Term(REGISTRY, 3)


def test_a_folder_keeps_its_term_until_someone_takes_over(tmp_path: Path) -> None:
    first = begin_term(tmp_path)
    assert first.number == 1
    assert begin_term(tmp_path) == first == read_term(tmp_path)
    assert raise_term(tmp_path) == Term(first.registry, 2) == begin_term(tmp_path)
    assert begin_term(tmp_path, at_least=9) == Term(first.registry, 9)
    assert begin_term(tmp_path, at_least=5) == Term(first.registry, 9)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"registry": "x", "term": 1}', b'{"term": 1}', b'{"registry": "\xff'])
def test_a_damaged_term_begins_a_registry_of_its_own(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "term.json").write_bytes(content)
    assert read_term(tmp_path) is None
    assert begin_term(tmp_path).number == 1


def test_a_daemon_ends_for_a_higher_term_of_its_registry_alone(tmp_path: Path) -> None:
    ended: list[str] = []
    term = begin_term(tmp_path)
    tenure = Tenure(tmp_path, term, ended.append)
    tenure.check((), believed=True)
    tenure.check(term.metadata(), believed=True)
    tenure.check(Term(OTHER if term.registry != OTHER else REGISTRY, 99).metadata(), believed=True)
    tenure.look()
    assert not ended
    higher = Term(term.registry, 2).metadata()
    with pytest.raises(Unavailable, match="the call names term 2 of this registry, the daemon's is 1: call the daemon that has"):
        tenure.check(higher, believed=False)
    assert not ended
    with pytest.raises(Unavailable):
        tenure.check(higher, believed=True)
    assert [reason.partition(".")[0] for reason in ended] == ["another daemon has taken over: its term is 2, this one's is 1"]
    raise_term(tmp_path)
    tenure.look()
    assert len(ended) == 2


def test_without_a_take_over_a_folder_in_use_is_refused(older: Daemon) -> None:
    with closing(standby(older.store)) as newer, pytest.raises(RuntimeError, match="another process uses"):
        newer.start()


def test_a_daemon_that_was_stopped_ends_when_it_continues(older: Daemon) -> None:
    first = random_weights(SPECS, 1)
    version = Job(older.channel, SPECS, [whole(SPECS)]).connect().publish(1, first)
    assert older.process is not None
    older.process.send_signal(signal.SIGSTOP)
    with closing(standby(older.store, take_over=True)) as newer:
        newer.start()
        second = random_weights(SPECS, 2)
        published = Job(newer.channel, SPECS, [whole(SPECS)]).connect().publish(2, second)
        assert (published.number, published.State.Name(published.state)) == (version.number + 1, "READY")
        older.process.send_signal(signal.SIGCONT)
        assert older.wait(60) == REPLACED_STATUS
        assert "resharderd: another daemon has taken over: its term is 2, this one's is 1" in older.log.read_text()
        assert [found.number for found in Operator(newer.endpoint).versions("policy")] == [published.number, version.number]
        for name, weights in ((version, first), (published, second)):
            found = read_folder(newer.store / f"models/policy/versions/{name.number:08}")
            assert all((found[tensor] == weights[tensor]).all() for tensor in weights)
        third = Job(newer.channel, SPECS, [whole(SPECS)]).connect().publish(3, first)
        assert third.State.Name(third.state) == "READY"


def test_a_daemon_that_runs_ends_before_the_other_one_reads_its_store(older: Daemon) -> None:
    with closing(standby(older.store, take_over=True)) as newer:
        newer.start()
        assert older.wait(60) == REPLACED_STATUS
        assert "lock_taken" not in newer.log.read_text()


def test_a_take_over_is_for_once(older: Daemon) -> None:
    older.stop()
    with closing(standby(older.store, take_over=True)) as newer:
        newer.start()
        newer.stop()
        newer.options["take_over"] = False
        newer.start()
        term = read_term(newer.store)
        assert term is not None
        assert term.number == 2


def test_a_client_tells_the_older_daemon_that_it_was_replaced(older: Daemon, tmp_path: Path) -> None:
    with closing(standby(copied(older, tmp_path / "store"), take_over=True)) as newer:
        newer.start()
        assert Operator(newer.endpoint).daemon().store_folder == str(newer.store)
        with pytest.raises(DaemonUnreachable, match="a daemon of term 2 has taken over from the one that answered, of term 1"):
            Operator(older.endpoint, connect_timeout=1).daemon()
        assert older.process is not None
        assert older.process.poll() is None  # who only looks ends no daemon
        with Channel(older.endpoint) as channel:
            with pytest.raises(DaemonReplaced):
                Job(channel.grpc, SPECS, [whole(SPECS)]).connect()
            with pytest.raises(grpc.RpcError):
                Job(channel.grpc, SPECS, [whole(SPECS)]).connect()
        assert older.wait(60) == REPLACED_STATUS


def test_a_stream_of_the_older_daemon_is_not_believed_once_a_newer_one_has_answered(older: Daemon, tmp_path: Path) -> None:
    terms, follow = NewestTerms(), operator_pb2.ListEventsRequest(last=1, follow=True)
    with closing(standby(copied(older, tmp_path / "store"), take_over=True)) as newer:
        newer.start()
        before, after = DaemonChannel(older.endpoint, None, [], terms), DaemonChannel(newer.endpoint, None, [], terms)
        events = operator_pb2_grpc.OperatorServiceStub(before).ListEvents(follow)
        next(events)
        operator_pb2_grpc.OperatorServiceStub(after).GetDaemon(operator_pb2.GetDaemonRequest())
        Job(older.channel, SPECS, [whole(SPECS)]).connect().publish(1, random_weights(SPECS, 1))  # events, for who believes it
        with pytest.raises(Exception, match=r"a daemon of term 2 has taken over from the one that answered, of term 1"):
            next(events)


def test_a_node_does_not_follow_the_older_daemon(older: Daemon, tmp_path: Path) -> None:
    """The node's connection goes to the newer daemon, and then to the older one again."""
    with closing(standby(copied(older, tmp_path / "store"), take_over=True)) as newer, closing(Proxy(newer.endpoint)) as way:
        newer.start()
        with Node(way.endpoint, "one") as node:
            wait_live(newer, "one")
            host, _, port = older.endpoint.rpartition(":")
            way._target = (host, int(port))
            way.cut()
            assert older.wait(60) == REPLACED_STATUS
            assert node.process is not None
            assert node.process.poll() is None
            way._target = ("127.0.0.1", newer.port)
            mark = time.monotonic()
            wait_until(lambda: "daemon_away" in node.log.read_text())
            wait_live(newer, "one")
            assert time.monotonic() - mark < 60


def test_an_answer_without_a_term_is_believed() -> None:
    """A daemon of an earlier release names none."""

    class Call:
        def initial_metadata(self) -> tuple[()]:
            return ()

    channel = DaemonChannel("127.0.0.1:9", None, [], NewestTerms())
    assert channel.seen(Call(), channel.now()) is None
    assert channel.metadata() == ()

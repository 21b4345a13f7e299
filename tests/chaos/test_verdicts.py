"""The judge of storms as one table: a promise, a history that keeps or breaks it, and the rules that the judge finds broken."""

from collections.abc import Callable, Iterator

import pytest

from tests.chaos.book import Book, published
from tests.chaos.home_rules import ENDS, SOON
from tests.chaos.replica_rules import BARRED, SHOWN
from tests.chaos.schedule import REPLICA_SECONDS

SHORT = (
    "1 of 1 pieces have fewer than 3 holders, and no node is left for 1 of them among 2 live ones: nothing has changed for 10 s"
)
Row = tuple[str, Book, list[str]]


# Beginnings of histories


def ahead() -> Book:
    """A server answers with version 2, which is UPLOADING, and its fleet may serve ahead."""
    return published(1).fleet(ahead=True).version(2, "UPLOADING").answer("2")


def moving(state: str, number: int = 2) -> dict[str, object]:
    return {"strategy": "ATOMIC", "refused": [], "move": [number, state, number - 1, number, "ATOMIC"]}


def on_far(replicas: int = 1) -> Book:
    """Two versions that ranks wrote on `far`; the daemon has copied the first."""
    book = Book().add("run", replicas=replicas, servers=["left", "right"], nodes=["node", "far"])
    for number in (1, 2):
        book.version(number, "UPLOADING", homes=["nodes/far"])
        book.publish(number, place="far", transport="node")
        book.version(number, "READY", whole=replicas > 1)
    return book.version(1, "READY", whole=True)


def far_died(number: int = 2) -> Book:
    return on_far().death("far").lost(number)


def alone(*, direct: bool = False) -> Book:
    """Version 3 is UPLOADING on `far`, which is killed for good."""
    book = on_far().version(3, "UPLOADING", homes=["nodes/far"], whole=True)
    book.fault("node.gone", "node", nodes=["far"], down=3600.0).add("death", process="far", status=-9)
    book.add("alone", nodes=["far"], versions=[3])
    failed = [{"version": 3, "reason": "VERSION_ABORTED", "transport": "node"}]
    return book.end(book.begin("publish", step=3, place="far", direct=direct), "publish", "VERSION_ABORTED", ranks=failed)


def with_nodes(replicas: int = 3) -> Book:
    """A run with three nodes, two of which hold version 1, which ranks wrote on one of them."""
    book = Book().add("run", replicas=replicas, servers=["left"], nodes=["node", "far", "third"], security=False)
    book.node("node").node("far", 1).node("third", 1)
    return book.publish(1, place="far", transport="node").version(1, "READY", whole=True).skip(40)


def ready(book: Book, *nodes: str, whole: bool = True, place: str = "store") -> Book:
    """Version 2 becomes READY while these nodes hold it."""
    book.version(2, "UPLOADING", whole=False)
    book.publish(2, place=place, transport="node" if place == "far" else "shared-memory")
    for name in nodes:
        book.node(name, 1, 2)
    return book.version(2, "READY", whole=whole)


def secured(security: bool = True, *outcomes: str) -> Book:
    """A run in which an intruder's calls have these outcomes."""
    book = Book().add("run", replicas=2, servers=["left"], nodes=[], security=security)
    for outcome in outcomes:
        book.add("intrusion", what="command", party="scraper", outcome=outcome)
    return book


# The table


def answers() -> Iterator[Row]:
    in_turn = published(1).answer("1").publish(2).answer("1", "2", v1="1100", v2="0011").version(2, "READY").answer("2")
    yield "a run without faults breaks nothing", in_turn.version(1, "RETIRED"), []
    yield "a token of another version", published(1).answer("1", v1="1101"), ["wrong token"]
    yield "versions that take turns", published(1, 2).answer("1", "2", v1="1010", v2="0101"), ["wrong token"]
    yield "versions in the wrong order", published(1, 2).answer("1", "2", v1="0011", v2="1100"), ["wrong label", "served back"]
    returned = published(1, 2).order("rollback", wanted=1, pick=None).answer("1", "2", v1="1001", v2="0110")
    yield "an answer may return to its first version by an order", returned, []
    yield "a version that made no token", published(1, 2).answer("1", "2", v1="1111", v2="0000"), ["wrong label"]
    for label in ("", "none", "7"):
        yield f"the label {label!r} of no version", published(1).answer(label), ["wrong label"]
    never = published(1).version(2, "UPLOADING").answer("2").version(2, "ABORTED")
    yield "a served version that was never READY", never, ["not READY"]
    ordered = published(1).order("ahead", on=True).version(2, "UPLOADING").answer("2").version(2, "ABORTED")
    yield "a fleet that is to serve ahead may serve it", ordered, []
    yield "a fleet that serves ahead by default may serve it", ahead().version(2, "ABORTED"), []


def turned_away() -> Iterator[Row]:
    def turned(book: Book, status: int, reason: str) -> Book:
        return book.add("turned", client="short", server="left", began=book.now - 0.5, status=status, reason=reason)

    yield "a gate may turn a request away", turned(Book(), 503, "not serving: applying version 2"), []
    yield "an engine that fails without a fault", turned(Book(), 500, "engine died"), ["turned away"]
    yield "a refusal that is not the gate's", turned(Book(), 503, "overloaded"), ["turned away"]
    killed = turned(Book().fault("server.kill", "left"), 0, "ConnectionResetError()").add("ready", process="left")
    yield "a killed server may cut a request", killed, []
    again = turned(Book().fault("server.kill", "left").add("ready", process="left"), 0, "ConnectionResetError()")
    yield "a server that runs again cuts none", again, ["turned away"]


def back() -> Iterator[Row]:
    yield "a server goes back without an order", published(1, 2).answer("2").answer("1"), ["served back"]
    for order in ("rollback", "target", "pin"):
        to_two = lambda order=order: published(1, 2, 3).answer("3").order(order, wanted=2, pick=0.5).answer("2")  # noqa: E731
        yield f"a server goes back by {order}", to_two(), []
        yield f"a server goes further back than {order} names", to_two().answer("1"), ["served back"]
    later = published(1, 2).order("rollback", wanted=1, pick=None)
    for number in (3, 4, 5):
        later.publish(number).version(number, "READY")
    yield "a rollback excuses no return from a later version", later.answer("5").answer("1"), ["served back"]
    unanswered = published(1, 2).answer("2").order("rollback", "UNREACHABLE", pick=None).answer("1")
    yield "an order whose answer was lost may have had effect", unanswered, []
    refused = {"refused": [2], "strategy": "CANARY", "move": [2, "FAILED", 1, 2, "CANARY"], "before": 6.0}
    yield "a fleet goes back from a version that it refused", published(1, 2).answer("2").add("fleet", **refused).answer("1"), []
    for name, given in (("strategy", {"kind": "ROLLING"}), ("skew", {"bound": 2}), ("ahead", {"on": False})):
        uploading = ahead().order(name, **given).answer("1").version(2, "READY")
        yield f"{given} takes a fleet back from an UPLOADING version", uploading, []
        was_ready = published(1).fleet(ahead=True).version(2, "READY").answer("2").order(name, **given).answer("1")
        yield f"{given} takes no fleet back from a READY version", was_ready.version(2, "READY"), ["served back"]


def atomic_moves() -> Iterator[Row]:
    def moved() -> Book:
        book = published(1, 2).add("fleet", **moving("APPLYING"), before=3.5).skip(60).answer("1", server="right").answer("2")
        return book.add("fleet", **moving("DONE"), before=6.0)

    yield "an atomic move", moved(), []
    yield "the old version after the new one of an atomic move", moved().answer("1", server="right"), ["mixed versions"]
    ended = published(1, 2, 3).add("fleet", **moving("DONE"), before=5.0).skip(60).answer("2").answer("1", server="right")
    yield "an atomic move judges nothing after its end", ended.add("fleet", **moving("DONE", 3), before=ended.now - 2), []


def versions() -> Iterator[Row]:
    for state in ("ABORTED", "UPLOADING", "ABSENT"):
        yield f"a READY version that is {state}", published(1).version(1, state), ["READY lost"]
    unready = Book().version(1, "UPLOADING").publish(1).version(1, "ABORTED")
    yield "a published version that the daemon aborts", unready, ["READY lost", "READY lost"]
    yield "a number of two steps", published(1).version(1, "READY", step=5), ["number reused"]
    twice = ["number reused", "number order"]
    yield "a number that is published twice", published(1).publish(1, step=2), twice
    yield "a number that decreases", published(2, 1), ["number order"]
    yield "an epoch that decreases", published(1).publish(2, epoch=0).version(2, "READY"), ["number order"]


def processes() -> Iterator[Row]:
    endless = Book()
    endless.begin("rollback", pick=None)
    yield "an operation that does not end", endless, ["stuck"]
    late = Book().order("sleep", server="")
    late.events[-1]["t"] += 100
    yield "an operation that ends late", late, ["stuck"]
    yield "a documented reason", Book().order("gc", "UNREACHABLE", keep=1), []
    for reason in ("INTERNAL", "OOPS", "HARNESS_KeyError"):
        yield f"the reason {reason}", Book().order("gc", reason, keep=1), ["INTERNAL"]
    ranks = Book()
    ranks.end(ranks.begin("publish", step=1), "publish", version=1, epoch=1, ranks=[{"reason": ""}, {"reason": "INTERNAL"}])
    yield "an internal reason of one rank", ranks.version(1, "READY"), ["INTERNAL"]
    traceback = Book().add("log", process="daemon", text="Traceback (most recent call last)")
    yield "a traceback in a log", traceback, ["INTERNAL"]

    def killed() -> Book:
        book = Book().add("ready", process="daemon", failpoint="").fault("daemon.kill", "daemon")
        return book.add("death", process="daemon", status=-9).add("ready", process="daemon", failpoint="")

    yield "a daemon that was killed may end", killed(), []
    yield "a daemon that ends without a fault", killed().add("death", process="daemon", status=1), ["unexpected death"]
    armed = Book().add("ready", process="daemon", failpoint="commit.sync@1=kill").add("death", process="daemon", status=-9)
    yield "a daemon with an armed failpoint may end", armed, []
    ready = Book().fault("node.kill", "far").add("ready", process="far", failpoint="")
    yield (
        "a node that ends before it is killed",
        ready.add("death", process="far", status=-9),
        ["unexpected death"],
    )
    late = Book().fault("node.kill", "far").add("ready", process="far", failpoint="").add("killing", process="far")
    yield "a node that is killed long after its fault may end", late.add("death", process="far", status=-9), []
    yield "a server that does not arrive", Book().peace("arrived", "servers/left is STAGING"), ["peace, arrived"]
    yield "shared memory that is left behind", Book().peace("end", "left: resharder-page"), ["peace, end"]


def lost() -> Iterator[Row]:
    yield "a version dies with its only holder", far_died(), []
    for fault, target, seconds, expected in (
        ("node.stop", "far", 12.8, []),
        ("link.silent", "far", 12.8, []),
        ("node.stop", "far", 2.0, ["lost"]),
        ("node.stop", "node", 12.8, ["lost"]),
        ("link.silent", "far-data", 12.8, ["lost"]),
        ("daemon.kill", "daemon", 0.0, ["lost"]),
    ):
        book = on_far().fault(fault, target, seconds=seconds).lost(2)
        yield f"a version is lost after {fault} of {target} for {seconds} s", book, expected
    yield "a holder that the daemon shows as lost", on_far().node("far", state="LOST").lost(2), []
    yield "a version is lost without a death", on_far().lost(2), ["lost"]
    early = Book().death("far").skip(5)
    early.events += [
        {**event, "t": event["t"] + early.now} | ({"before": event["before"] + early.now} if "before" in event else {})
        for event in on_far().events
    ]
    yield "a holder died before the version began", early.skip(20).lost(2), ["lost"]
    yield "a version is lost that the daemon had copied", far_died(1), ["lost"]
    yield "a version is lost that had two replicas", on_far(replicas=2).death("far").lost(2), ["lost", "lost"]
    elsewhere = on_far().publish(3, place="far", transport="http").version(3, "READY", whole=False).death("far").lost(3)
    yield "a version is lost that no rank wrote on a node", elsewhere, ["lost"]
    for state in ("ABORTED", "ABSENT"):
        yield f"with one replica a READY version is {state}", on_far().death("far").version(2, state), ["READY lost"]
    served = on_far().answer("2").death("far").lost(2).answer("2").answer("2", "1", v2="1100", v1="0011").answer("1")
    yield "a server goes back from a lost version", served, []
    stays = on_far().answer("2").death("far").lost(2).skip(2 * SOON).answer("2").answer("2")
    yield "a server stays on a lost version", stays, []

    def began() -> Book:
        return on_far().answer("1").death("far").lost(2).skip(SOON - 5).answer("2").answer("1")

    yield "an install may have begun before the loss", began(), []
    moved = ["moved to a lost version"]
    yield "a server moves to a lost version", began().skip(10).answer("1").answer("2"), moved
    yield "an answer moves to a lost version", began().skip(10).answer("1", "2", v1="1100", v2="0011"), moved


def killed_for_good() -> Iterator[Row]:
    yield "a version of killed nodes is ABORTED", alone().version(3, "ABORTED", why="far is lost").skip(2 * ENDS).answer("1"), []
    yield "a version of killed nodes is LOST", alone().lost(3).skip(2 * ENDS).answer("1"), []
    uploads = alone().version(3, "UPLOADING", whole=True).skip(2 * ENDS).answer("1")
    yield "a version of killed nodes stays UPLOADING", uploads, ["gone"]

    def stays() -> Book:
        return alone().version(3, "READY", whole=False).skip(2 * ENDS).answer("1")

    yield "a version of killed nodes stays READY", stays(), ["gone"]
    yield "a version of killed nodes that the daemon copied", stays().version(3, "READY", whole=True), []
    for direct, later, expected in ((False, 0.0, ["gone"]), (True, 0.0, []), (True, 2 * ENDS, ["gone"])):
        book = alone(direct=direct).fleet(ahead=True).version(3, "ABORTED", why="far is lost").skip(later).answer("3")
        yield f"a version of killed nodes is served, direct={direct}, {later:.0f} s later", book, expected


def hosts() -> Iterator[Row]:
    for place, transport, expected in (
        ("far", "node", []),
        ("far", "http", []),
        ("far", "shared-memory", ["other host"]),
        ("store", "shared-memory", []),
        ("store", "node", ["other host"]),
        ("grpc", "grpc", []),
        ("grpc", "node", ["other host"]),
        ("grpc", "http", ["other host"]),
    ):
        book = on_far().publish(3, place=place, transport=transport).version(3, "READY", whole=True)
        yield f"ranks at {place} deliver by {transport}", book, expected
    for server, transport, expected in (
        ("left", "shared-memory", []),
        ("left", "http", []),
        ("left", "node", ["other host"]),
        ("right", "node", []),
        ("right", "direct", []),
        ("right", "shared-memory", ["other host"]),
    ):
        book = on_far().add("server", name=server, transports=["direct", transport])
        yield f"workers of {server} read by {transport}", book, expected

    def by_port() -> Book:
        book = Book().add("run", replicas=1, servers=["left"], nodes=["node", "far"])
        return book.publish(1, place="far", transport="http").version(1, "READY", whole=True)

    yield "ranks never wrote on their node", by_port(), ["other host"]
    yield "ranks wrote on their node", by_port().publish(2, place="far", transport="node").version(2, "READY", whole=True), []
    without = Book().add("run", replicas=1, servers=["left"], nodes=[]).publish(1, place="grpc", transport="grpc")
    yield "a run without nodes", without.version(1, "READY", whole=True), []


def replicas() -> Iterator[Row]:
    for nodes in (("node", "far"), ("far", "third"), ("node", "far", "third")):
        yield f"{nodes} hold a READY version", ready(with_nodes(), *nodes).skip(60), []
    for nodes in ((), ("far",)):
        yield f"only {nodes} hold a READY version", ready(with_nodes(), *nodes).skip(60), ["holders"]
        yield f"two replicas on the daemon and {nodes}", ready(with_nodes(2), *nodes).skip(60), ["holders"] * (not nodes)
    yield "the node on which ranks wrote holds it", ready(with_nodes(), "third", place="far").skip(60), []
    yield "the node on which ranks wrote is one", ready(with_nodes(), place="far").skip(60), ["holders"]
    for late, expected in ((0.0, []), (SHOWN, ["holders"])):
        book = ready(with_nodes(), "far")
        book.now = book.events[-1]["t"] + SHOWN / 2 + late
        yield f"a holder that is shown {late} s late", book.node("third", 1, 2).skip(60), expected
    for state in ("DRAINED", "LOST"):
        yield f"a {state} node is no holder", ready(with_nodes().node("third", 1, 2, state=state).skip(40), "far"), ["holders"]
    for count in (2, 3):
        yield f"{count} replicas, and the daemon lacks pieces", ready(with_nodes(count), "node", "far", whole=False), ["holders"]
    yield "one replica, and the daemon lacks pieces", ready(with_nodes(1), whole=False), []
    yield "a READY version is lost", ready(with_nodes(), "node", "far").skip(60).death("node").death("far").lost(2), ["lost"] * 3


CHANGES: tuple[Callable[[Book], object], ...] = (
    lambda book: book.death("third"),
    lambda book: book.death("daemon"),
    lambda book: book.order("drain_node", node="third"),
    lambda book: book.node("third", state="DRAINED"),
    lambda book: book.node("third", state="LOST"),
    lambda book: book.add("ready", process="third", failpoint=""),
)
NO_CHANGES: tuple[Callable[[Book], object], ...] = (
    lambda book: book.fault("server.stop", "left", seconds=2.0),
    lambda book: book.fault("link.silent", "third-data", seconds=2.0),
    lambda book: book.fault("node.stop", "third", seconds=2.0),
    lambda book: book.fault("trainer.kill", "trainer", part="job", new_job=False),
)
EXCUSES: tuple[Callable[[Book], object], ...] = (
    lambda book: book.death("third"),
    lambda book: book.fault("node.stop", "third", seconds=12.8),
    lambda book: book.fault("link.silent", "third-data", seconds=12.8),
    lambda book: book.fault("daemon.kill", "daemon", down=3.0, failpoint=""),
    lambda book: book.fault("certificates.renew", "far", party="far"),
    lambda book: book.node("third", state="LOST"),
)


def changes_of_nodes() -> Iterator[Row]:
    for index, change in enumerate(CHANGES):
        for early in (True, False):
            book = with_nodes()
            if early:
                change(book)
            book.publish(2, place="store", transport="shared-memory").node("far", 1, 2)
            if not early:
                change(book)
            when = "before" if early else "after"
            yield f"change {index} {when} a version began", book.skip(20).version(2, "READY", whole=True), ["holders"] * early
    for index, change in enumerate(NO_CHANGES):
        book = with_nodes()
        change(book)
        yield f"fault {index} changes no node", ready(book, "far").skip(60), ["holders"]


def aborts() -> Iterator[Row]:
    for index, excuse in enumerate(EXCUSES):
        book = with_nodes()
        excuse(book)
        book.skip(1).node("third").skip(REPLICA_SECONDS).version(2, "ABORTED", why=SHORT)
        book.skip(BARRED / 2).version(3, "ABORTED", why=SHORT)
        yield f"fault {index} of a node excuses aborts for some time", book, []
        longer = Book()
        longer.events, longer.now = [*book.events], book.now
        longer.skip(3 * BARRED).version(4, "ABORTED", why=SHORT)
        yield f"fault {index} of a node excuses no later abort", longer, ["needless abort"]
    yield "an abort for another reason", with_nodes().version(2, "ABORTED", why="the ranks began a later step"), []
    yield "an abort for lack of holders without a fault", with_nodes().version(3, "ABORTED", why=SHORT), ["needless abort"]
    one = with_nodes(1).death("third").version(2, "ABORTED", why=SHORT)
    yield "with one replica nothing waits for further nodes", one, ["needless abort"]


def security() -> Iterator[Row]:
    for outcome in ("NOT_ALLOWED", "401", "403"):
        yield f"an intrusion ends with {outcome}", secured(True, outcome, "UNREACHABLE", "0").peace("begin"), []
    for outcome in ("ok", "INTERNAL", "200", "NOT_READY"):
        yield f"an intrusion ends with {outcome}", secured(True, outcome, "NOT_ALLOWED"), ["intrusion"]
    yield "an intruder who never got an answer", secured(True, "UNREACHABLE").peace("begin"), ["intrusion"]
    yield "an intruder who never tried", secured().peace("begin"), ["intrusion"]
    yield "a run without security", secured(False).peace("begin"), []
    yield "a connection without TLS", secured().add("links", plain={"far-data": 2}), ["plain"]
    yield "a connection without TLS or security", secured(False).add("links", plain={"far-data": 2}), []
    for path, status, expected in (
        ("/metrics", 0, []),
        ("/readyz", 503, []),
        ("/metrics", 503, ["page"]),
        ("/", 500, ["page"]),
        ("/api/status", 403, ["page"]),
    ):
        yield f"{path} answers {status}", Book().add("page", path=path, status=status, text=""), expected


def regions() -> Iterator[Row]:
    def home() -> Book:
        return published(1).version(2, "READY", fingerprint="two")

    def there(book: Book, number: int, *, same: bool = True, served: bool = True, **label: object) -> Book:
        named = {"step": 2, "epoch": 1, "fingerprint": "two", **label}
        book.add("region", what="ready", number=number, same=same, **named)
        return book.add("region", what="served", number=number) if served else book

    yield "a region has home's version", there(home(), 2), []
    yield "home retires it before the region has it", there(home().version(2, "RETIRED", fingerprint="two"), 2), []
    yield "home is seen to have it later", there(published(1), 2).version(2, "READY", fingerprint="two"), []
    yield "a region has a version that home never had READY", there(published(1).version(2, "UPLOADING"), 2), ["region"]
    yield "a region has a number that home has not", there(home(), 3), ["region"]
    for label in ({"step": 3}, {"epoch": 2}, {"fingerprint": "other"}):
        yield f"a region has another label: {label}", there(home(), 2, **label), ["region"]
    yield "a region has other weights", there(home(), 2, same=False), ["region"]
    unknown = there(home(), 2, served=False).add("region", what="served", number=1)
    yield "a server in a region has a version that was not READY there", unknown, ["served in the region"]


SECTIONS = (
    answers, turned_away, back, atomic_moves, versions, processes, lost, killed_for_good, hosts, replicas, changes_of_nodes,
    aborts, security, regions,
)  # fmt: skip
ROWS = [row for section in SECTIONS for row in section()]


@pytest.mark.parametrize(("book", "verdict"), [row[1:] for row in ROWS], ids=[row[0] for row in ROWS])
def test_the_judge(book: Book, verdict: list[str]) -> None:
    assert sorted(book.rules()) == sorted(verdict)


def test_each_rule_is_broken_by_a_row() -> None:
    """A rule that no row breaks would find nothing."""
    from tests.chaos.model import RULES

    broken = {rule for _, _, verdict in ROWS for rule in verdict}
    assert len(broken) >= len(RULES)

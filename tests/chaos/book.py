"""Histories that are written by hand, for tests of the model."""

from typing import Any, Self

from tests.chaos.history import Event
from tests.chaos.model import check

DOCUMENTED = {"UNREACHABLE", "VERSION_ABORTED"}


class Book:
    """A history that is written by hand, one second an event. Every method that adds to it returns the book."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.now, self._ids = 0.0, 0

    def skip(self, seconds: float) -> Self:
        self.now += seconds
        return self

    def add(self, kind: str, **fields: Any) -> Self:
        self.events.append({"t": self.now, "kind": kind, **fields})
        self.now += 1.0
        return self

    def answer(self, *versions: str, server: str = "left", **made: str) -> Self:
        bits = {version: made.get(f"v{version}", "1111") for version in versions}
        times = {"began": self.now - 0.5, "ended": self.now}
        return self.add("answer", client="short", server=server, **times, versions=versions, made=bits)

    def version(self, number: int, state: str, step: int = 0, **seen: Any) -> Self:
        return self.add("version", number=number, state=state, step=step or number, epoch=1, before=self.now - 0.4, **seen)

    def fleet(self, ahead: bool) -> Self:
        return self.add("fleet", strategy="ALL_AT_ONCE", refused=[], move=None, ahead=ahead, before=self.now - 0.4)

    def begin(self, name: str, **given: Any) -> int:
        self._ids += 1
        self.add("begin", id=self._ids, name=name, given=given)
        return self._ids

    def end(self, id: int, name: str, outcome: str = "ok", **result: Any) -> Self:
        return self.add("end", id=id, name=name, outcome=outcome, text="", result=result)

    def publish(self, number: int, step: int = 0, epoch: int = 1, place: str = "", transport: str = "") -> Self:
        id = self.begin("publish", step=step or number, place=place)
        rank = {"version": number, "reason": "", "transport": transport}
        return self.end(id, "publish", version=number, epoch=epoch, ranks=[rank, rank])

    def death(self, process: str) -> Self:
        self.add("fault", name="node.kill", target=process, given={})
        return self.add("death", process=process, status=-9)

    def node(self, name: str, *holds: int, state: str = "LIVE") -> Self:
        return self.add("node", name=f"nodes/{name}", state=state, problems={}, holds=list(holds), before=self.now - 0.4)

    def fault(self, name: str, target: str, **given: Any) -> Self:
        return self.add("fault", name=name, target=target, given=given)

    def lost(self, number: int) -> Self:
        return self.version(number, "RETIRED", why="LOST: neither the daemon nor a node holds 1 of 2 pieces")

    def order(self, name: str, outcome: str = "ok", *, wanted: int = 0, **given: Any) -> Self:
        """An operation that begins and ends."""
        return self.end(self.begin(name, **given), name, outcome, **({"wanted": wanted} if wanted else {}))

    def peace(self, phase: str, *problems: str) -> Self:
        return self.add("peace", phase=phase, problems=list(problems))

    def rules(self) -> list[str]:
        return [violation.rule for violation in check(self.events, DOCUMENTED)]


def published(*numbers: int) -> Book:
    book = Book()
    for number in numbers:
        book.publish(number)
        book.version(number, "READY")
    return book

"""Scenes of the status page, of made-up state: bad days and large fleets, which a real daemon is slow to bring about.

with scene("a lost server") as shown:
    page.get(shown.url)
    shown.end()        # the daemon goes away

`python -m tools.screenshot --scenes FOLDER` writes a picture of each, wide and narrow, light and dark.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from resharder.server.fleets.explain import FleetView, ServerView, state_of
from resharder.server.infra.event_log import Event
from resharder.server.ingest.publisher import ACTIVE, PublisherRecord
from resharder.server.observability.metrics.gauges import NOTHING
from resharder.server.observability.snapshot import Slots, Snapshot
from resharder.server.state.fleet import Fleet, Move, UpdateStrategy
from resharder.server.state.server import Control, Failure, Goal, Install, Server, Worker
from resharder.server.state.version import READY, RETIRED, UPLOADING, VersionRecord
from resharder.server.web.app import check_host, web_app
from resharder.server.web.listener import Listener
from resharder.server.web.status import status
from resharder.v1 import resources_pb2

GIB, SIZE = 1 << 30, 16 << 30
STAGED = 1.9  # seconds


class Shown(NamedTuple):
    """A scene that is being served. `end` ends the server, as a daemon that goes away."""

    url: str
    end: Callable[[], None]


class Scene(NamedTuple):
    """What the daemon knows and has recorded. Its clock stands still."""

    now: Snapshot
    events: Sequence[Event]


def versions(model: str, newest: int, now: float, *, uploading: bool = False) -> list[VersionRecord]:
    """Versions of steps 10 to a number; the last four are READY, one more arrives with `uploading`."""
    found = []
    for number in range(1, newest + 1 + uploading):
        ready = now - 180.0 * (newest - number) - 40
        state = READY if newest - 4 < number <= newest else RETIRED
        record = VersionRecord(
            model, number, state, 1, 10 * number, f"{model}-run-7", SIZE, 399, ready - 30, ready_time=ready,
            end_time=0.0 if state == READY else ready + 720,
        )  # fmt: skip
        found.append(
            record if number <= newest else replace(record, state=UPLOADING, create_time=now - 12, ready_time=0.0, end_time=0.0)
        )
    return found


def server(
    id: str, version: int, *, fleet: str = "policy", reason: str = "it is the fleet's target", **changes: Any
) -> ServerView:
    """A server of two workers that serves a version, or is as `changes` say."""
    install = Install(f"i-{version}", version, resources_pb2.Install.COMMITTED, 0.0, 0.0, pause_seconds=0.31)
    workers = {
        rank: Worker(
            rank, resources_pb2.Worker.APPLIED, version, install.id, holds=version, held_as="f", needed_bytes=SIZE // 2,
            transport="shared-memory", stage_seconds=STAGED, apply_seconds=0.22,
        )
        for rank in range(2)
    }  # fmt: skip
    one = Server(
        id, "policy", fleet, "life", 0.0, ready={version: "f"}, booting=False, attached=True, world_size=2, workers=workers,
        controls=(Control("c", f"10.0.0.7:{8000 + len(id)}", 0.0, in_flight=17),), confirmed=version, opened=version,
        resumed=True, install=install, power=resources_pb2.AWAKE, goal=Goal(version=4),
    )  # fmt: skip
    one = replace(one, **changes)
    text = reason if one.lost_at is not None or not one.opened else f"serving version {one.opened}; {reason}"
    return ServerView(one, state_of(one), text, 0.0, 0.0)


def fleet(
    name: str, wanted: int, reason: str = "at its target version", *, model: str = "policy", move: Move | None = None
) -> FleetView:
    return FleetView(Fleet(name, model, move=move, settled=wanted), wanted, (), reason)


def move(state: int, start: int, to: int, now: float, reason: str = "", **more: Any) -> Move:
    kind = UpdateStrategy(kind=resources_pb2.UpdateStrategy.ROLLING, at_a_time=1, max_failures=1)
    return Move(7, state, start, to, kind, now - 95, reason, **more)


def trainer(model: str, job: str = "grpo-run-42") -> PublisherRecord:
    return PublisherRecord(model, job, 3, 8, state=ACTIVE)


def events(now: float, *lines: tuple[str, str, str, Mapping[str, str], str]) -> list[Event]:
    """Events, oldest first, of (kind, subject, what, details, reason), 20 s apart; the last one is 3 s old."""
    count = len(lines)
    return [
        Event(at + 1, now - 3 - 20.0 * (count - at - 1), kind, subject, what, reason, dict(details))
        for at, (kind, subject, what, details, reason) in enumerate(lines)
    ]


def plain(now: float, servers: Sequence[ServerView], view: FleetView, **more: Any) -> Snapshot:
    """A daemon with one fleet, whose trainer publishes version 5."""
    records = versions("policy", 4, now, uploading=True)
    return replace(
        NOTHING,
        **{
            "time": now, "store_used": 5 * SIZE, "store_limit": 8 * SIZE, "versions": {"policy": records},
            "arriving": {record.name: Slots(3, 8, SIZE // 3, SIZE) for record in records if record.state == UPLOADING},
            "publishers": [(trainer("policy"), 8)], "fleets": [view], "servers": {view.fleet.name: servers},
        }
        | more,
    )  # fmt: skip


MOVED = ("move", "fleets/policy", "moving", {"from": "3", "to": "4", "strategy": "ROLLING"}, "")
CAME = ("version", "models/policy/versions/4", "ready", {"step": "40", "epoch": "3"}, "")
WHY = "worker 1: model.layers.17.mlp.down_proj.weight: digest differs after 3 reads: CHECKSUM"
SILENT = "its control side has been silent for 42 s"


def staging(to: int, now: float) -> dict[str, Any]:
    return {"install": Install(f"i-{to}", to, resources_pb2.Install.STAGING, now - 4, now - 4)}


def a_failed_install(now: float) -> Scene:
    why = f"version 4 failed 3 times, last: {WHY}; waits for a newer version"
    failed = {4: Failure(3, WHY, 0.0)}
    torn = server("rollout-2", 3, opened=0, resumed=False, torn=frozenset({1}), failures=failed, reason=f"out of service: {WHY}")
    group = [server("rollout-0", 4), server("rollout-1", 3, failures=failed, reason=why), torn]
    done = move(resources_pb2.Move.DONE, 3, 4, now, failed={"rollout-1": WHY, "rollout-2": WHY})
    lines = [CAME, MOVED, ("server", "servers/rollout-0", "serving", {"from": "3", "to": "4"}, "it is the fleet's target")]
    lines += [("server", "servers/rollout-2", "failed", {"from": "3", "to": "4"}, WHY)]
    reason = "at its target version, except 2 servers"
    return Scene(plain(now, group, fleet("policy", 4, reason, move=done)), events(now, *lines))


def a_lost_server(now: float) -> Scene:
    lost = server("left", 4, lost_at=1.0, reason=SILENT)
    lines = [CAME, MOVED, ("move", "fleets/policy", "done", {"from": "3", "to": "4", "strategy": "ROLLING"}, "")]
    lines += [("server", "servers/left", "lost", {"from": "4", "to": "4"}, SILENT)]
    return Scene(plain(now, [lost, server("right", 4)], fleet("policy", 4)), events(now, *lines))


def a_stopped_move(now: float) -> Scene:
    stopped = move(resources_pb2.Move.STOPPED, 3, 4, now, "it failed on servers/rollout-1", failed={"rollout-1": WHY})
    behind = server("rollout-1", 3, failures={4: Failure(1, WHY, 0.0)}, reason=f"version 4 failed once: {WHY}")
    group = [server("rollout-0", 4), behind, server("rollout-2", 3, reason="waits for its turn")]
    reason = f"from version 3 to 4, 1 of 3 servers there; stopped: {stopped.reason}; `approve` goes on, `back` goes back"
    lines = [CAME, MOVED, ("move", "fleets/policy", "stopped", {"from": "3", "to": "4", "strategy": "ROLLING"}, stopped.reason)]
    return Scene(plain(now, group, fleet("policy", 4, reason, move=stopped)), events(now, *lines))


def a_store_almost_full(now: float) -> Scene:
    group = [server("rollout-0", 4), server("rollout-1", 4)]
    return Scene(plain(now, group, fleet("policy", 4), store_used=8 * SIZE, available={"policy": SIZE // 2}), events(now, CAME))


def a_daemon_away(now: float) -> Scene:
    """What is known of it. The picture is taken after `end`."""
    return Scene(plain(now, [server("rollout-0", 4), server("rollout-1", 4)], fleet("policy", 4)), events(now, CAME))


def twenty_servers(now: float) -> Scene:
    moving = move(resources_pb2.Move.MOVING, 3, 4, now)
    group = [server(f"policy-rollout-replica-{at}", 4) for at in range(11)]
    group += [server(f"policy-rollout-replica-{at}", 3, reason="version 4 is next", **staging(4, now)) for at in (11, 12)]
    group += [server(f"policy-rollout-replica-{at}", 3, reason="waits for its turn") for at in range(13, 19)]
    group += [server("policy-rollout-replica-19", 3, lost_at=1.0, reason=SILENT)]
    view = fleet("policy", 4, "from version 3 to 4, 11 of 20 servers there", move=moving)
    return Scene(plain(now, group, view), events(now, CAME, MOVED))


def ten_models(now: float) -> Scene:
    models = [f"policy-{size}b" for size in (1, 3, 7, 8, 14, 30, 32, 70, 120)] + ["import-only"]
    records = {model: versions(model, 4 if model != "import-only" else 1, now) for model in models}
    views = [fleet(model, 4, model=model) for model in models[:-1]]
    groups = {view.fleet.name: [server(f"{view.fleet.name}-{at}", 4, fleet=view.fleet.name) for at in (0, 1)] for view in views}
    views[3] = fleet(
        models[3],
        4,
        "from version 3 to 4, 1 of 2 servers there",
        model=models[3],
        move=move(resources_pb2.Move.HOLDING, 3, 4, now),
    )
    groups[models[3]][1] = server(f"{models[3]}-1", 3, fleet=models[3], reason="waits for its turn")
    groups[models[6]][0] = server(
        f"{models[6]}-0", 4, fleet=models[6], power=resources_pb2.ASLEEP_1, opened=0, reason="asleep by order"
    )
    groups[models[8]] = []
    publishers = [(trainer(model), 8) for model in models[:4]] + [(trainer("import-only", "import-step-10-0f3a"), 0)]
    known = replace(plain(now, [], views[0]), versions=records, arriving={}, publishers=publishers, fleets=views, servers=groups)
    return Scene(known, events(now, CAME))


def adapters(now: float) -> Scene:
    """Two adapters in the servers of their base; the second is bound to a version of it that no server has yet."""
    records = {"policy": versions("policy", 4, now)}
    for model, base_version in (("policy-code", 4), ("policy-math", 5)):
        records[model] = [
            replace(one, base="policy", base_version=base_version, size_bytes=SIZE // 400) for one in versions(model, 3, now)
        ]
    hosts = [server(f"rollout-{at}", 4) for at in (0, 1)]
    groups, views = {"policy": hosts}, [fleet("policy", 4)]
    held = "version 3 was trained on version 5 of its base, which is at 4"
    for model in ("policy-code", "policy-math"):
        code = model == "policy-code"
        groups[model] = [
            server(f"rollout-{at}.{model}", 3, fleet=model, model=model, goal=Goal(version=3))
            if code
            else server(f"rollout-{at}.{model}", 2, fleet=model, model=model, goal=Goal(version=3), reason=held)
            for at in (0, 1)
        ]
        reason = "at its target version" if code else "at its target version, except 2 servers"
        views.append(replace(fleet(model, 3, reason, model=model), base="policy"))
    publishers = [(trainer(model), 8) for model in records]
    known = replace(
        plain(now, hosts, views[0]), versions=records, arriving={}, publishers=publishers, fleets=views, servers=groups
    )
    return Scene(
        known, events(now, CAME, ("version", "models/policy-math/versions/3", "ready", {"step": "30", "epoch": "3"}, ""))
    )


SCENES: dict[str, Callable[[float], Scene]] = {
    made.__name__.replace("_", " "): made
    for made in (
        a_failed_install, a_lost_server, a_stopped_move, a_store_almost_full, a_daemon_away, twenty_servers, ten_models, adapters,
    )
}  # fmt: skip


def shown_status(name: str) -> dict[str, Any]:
    """The data of the page for a scene, now."""
    now = time.time()
    made = SCENES[name](now)
    return status(made.now, made.events, release="1.0.0", started=now - 7300, unready="")


@contextmanager
def scene(name: str) -> Iterator[Shown]:
    """Serve a scene under an address of its own."""
    data = shown_status(name)

    def moment() -> dict[str, Any]:
        return data | {"time": time.time()}

    app = web_app(status=moment, metrics=lambda accept: (b"", "text/plain"), unready=lambda: "", check=check_host)
    web = Listener(app, "127.0.0.1", 0)
    with ExitStack() as stack:
        stack.callback(web.close)
        yield Shown(f"http://127.0.0.1:{web.port}/", stack.close)

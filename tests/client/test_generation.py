"""A trainer that lends its GPUs: who may wake and sleep when, over all ranks, whatever fails."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from resharder.client.errors import GenerationEnded, ResharderError, ServersNotAsleep, UsageError, WaitTimeout
from resharder.client.operator import answers
from resharder.client.operator.convert import answer
from resharder.client.trainer.delivery import Wake
from resharder.client.trainer.generation import Generation, GenerationPart, Ranks, SharedFleet, meet
from resharder.client.trainer.handle import Handle
from resharder.client.trainer.identity import RankIdentity
from resharder.v1 import resources_pb2
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from tests.client.models import together
from tests.support.observing import wait_until

Server, Power, VersionTarget = resources_pb2.Server, resources_pb2.Power, resources_pb2.VersionTarget
SHORT, LONG = 0.5, 60.0


class Gpus:
    """Servers that do at once what they are told, ranks on the same GPUs, and what all of them did, in order.

    It is a violation when servers are woken while a rank's memory is there, or memory comes back while a server is awake.
    """

    def __init__(self, ranks: int = 1, servers: int = 2) -> None:
        self.log: list[str] = []
        self.violations: list[str] = []
        self.here = [True] * ranks
        self.running = {
            f"servers/{number}": Server(name=f"servers/{number}", fleet="policy", address=f"host:{number}")
            for number in range(servers)
        }
        self.policy = resources_pb2.Fleet(name="policy")
        self.stuck: set[str] = set()
        self.before_wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._change(Power.ASLEEP_2)

    def wake(self, fleet: str, *, tag: str = "") -> None:
        self._set_power(Power.WEIGHTS_AWAKE if tag else Power.AWAKE)

    def sleep(self, fleet: str, *, level: int) -> None:
        self._set_power(Power.ASLEEP_1 if level == 1 else Power.ASLEEP_2)

    def _set_power(self, power: int) -> None:
        if power == Power.AWAKE:
            self.before_wake()
        with self._lock:
            self.log.append(Power.Name(power))
            if power == Power.AWAKE and any(self.here):
                self.violations.append(f"woken while ranks hold memory: {self.here}")
            self._change(power)

    def servers(self, fleet: str) -> list[answers.Server]:
        with self._lock:
            return [answer(answers.Server, server) for server in self.running.values()]

    def fleets(self) -> list[answers.Fleet]:
        return [answer(answers.Fleet, self.policy)]

    def offload(self, rank: int) -> None:
        with self._lock:
            self.log.append("offloaded")
            self.here[rank] = False

    def bring_back(self, rank: int) -> None:
        with self._lock:
            self.log.append("back")
            if any(server.power == Power.AWAKE for server in self.running.values()):
                self.violations.append(f"rank {rank} came back while servers were awake")
            self.here[rank] = True

    def _change(self, power: int) -> None:
        for name, server in self.running.items():
            if name not in self.stuck:
                server.power = resources_pb2.Power.ValueType(power)
                server.state = Server.SERVING if power == Power.AWAKE else Server.ASLEEP
                server.version = 7


class Published(Handle):
    """A version as the daemon would answer for it."""

    def __init__(self, version: resources_pb2.Version) -> None:
        self.name, self.version, self.step, self.answer = version.name, version.number, version.step, version

    def get(self, *, serving: bool = False, wait_seconds: float = 0.0) -> resources_pb2.Version:
        return self.answer


@contextmanager
def generation(
    gpus: Gpus,
    *,
    rank: int = 0,
    store: Store | None = None,
    number: int = 1,
    kind: type[Ranks] = Ranks,
    timeout: float = LONG,
    reach: Callable[[str], None] = lambda where: None,
    direct: bool = False,
) -> Iterator[Generation]:
    """`reach` is told where the rank has got to, and may raise."""

    def publish(wake: Wake | None) -> Handle:
        reach("publish")
        version = resources_pb2.Version(name="models/policy/versions/7", number=7, state=resources_pb2.Version.READY)
        if wake is not None:
            wake(Published(version))
        reach("published")
        return Published(version)

    def offload() -> None:
        reach("offloaded")
        gpus.offload(rank)

    operator: Any = gpus
    part = GenerationPart(
        kind(store or HashStore(), rank, len(gpus.here), "job", number),
        SharedFleet(operator, "policy"),
        level=2,
        timeout=timeout,
        offload=offload,
        bring_back=lambda: gpus.bring_back(rank),
        direct=direct,
    )
    with part.held(publish, ()) as held:
        yield held


def test_memory_is_offloaded_before_servers_wake_and_comes_back_when_they_sleep() -> None:
    gpus = Gpus()
    with generation(gpus) as held:
        gpus.log.append("body")
        assert held == Generation(7, ("host:0", "host:1"))
    assert gpus.log == ["offloaded", "AWAKE", "body", "ASLEEP_2", "back"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_body_puts_servers_to_sleep_all_the_same(error: type[BaseException]) -> None:
    gpus = Gpus()
    with pytest.raises(error), generation(gpus):
        raise error
    assert gpus.log == ["offloaded", "AWAKE", "ASLEEP_2", "back"]


def test_servers_that_lag_are_named_with_their_reason_and_put_to_sleep() -> None:
    gpus = Gpus()
    gpus.running["servers/1"].reason = "no room for the KV cache"
    gpus.stuck = {"servers/1"}
    late = r"servers/1: ASLEEP at host:1 with version 7, ASLEEP_2 \(no room for the KV cache\)$"
    lag = rf"waited 0\.5 s for .* version 7 or newer: {late}"
    with pytest.raises(WaitTimeout, match=lag), generation(gpus, timeout=SHORT):
        pass
    assert gpus.log == ["offloaded", "AWAKE", "ASLEEP_2", "back"]


def test_a_fleet_without_a_live_server_is_an_error_and_drained_servers_are_not_waited_for() -> None:
    gpus = Gpus()
    gpus.running["servers/1"].drained, gpus.stuck = True, {"servers/1"}
    with generation(gpus) as held:
        assert held.servers == ("host:0",)
    with pytest.raises(WaitTimeout, match="the fleet: has no live server"), generation(Gpus(servers=0), timeout=SHORT):
        pass


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (resources_pb2.Fleet(target=VersionTarget(kind=VersionTarget.NUMBER, version=6)), "its target is version 6"),
        (resources_pb2.Fleet(target=VersionTarget(kind=VersionTarget.NONE)), "it has no target"),
        (
            resources_pb2.Fleet(refused=[resources_pb2.Refusal(version=7, reason="rolled back")]),
            "it has refused that: rolled back",
        ),
    ],
)
def test_a_fleet_that_will_not_take_the_version_is_an_error_at_once(policy: resources_pb2.Fleet, why: str) -> None:
    gpus = Gpus()
    policy.name = "policy"
    gpus.policy, gpus.stuck = policy, {"servers/0"}
    with pytest.raises(UsageError, match=f"does not take version 7: {why}"), generation(gpus):
        pass
    assert gpus.log[-2:] == ["ASLEEP_2", "back"]


def stick_and_raise(gpus: Gpus) -> None:
    gpus.stuck = {"servers/1"}
    raise ZeroDivisionError


def test_memory_is_not_brought_back_while_a_server_may_be_awake() -> None:
    gpus = Gpus()
    with (
        pytest.raises(ServersNotAsleep, match=r"servers/1: SERVING .*AWAKE; .*bring_back") as caught,
        generation(gpus, timeout=SHORT),
    ):
        stick_and_raise(gpus)
    assert isinstance(caught.value.__context__, ZeroDivisionError), "the body's own error is told as well"
    assert gpus.log == ["offloaded", "AWAKE", "ASLEEP_2"]


def test_servers_that_cannot_be_told_to_sleep_keep_memory_offloaded() -> None:
    gpus = Gpus()

    def unreachable(fleet: str, *, level: int) -> None:
        raise ResharderError("the daemon is gone")

    with pytest.raises(ServersNotAsleep, match=r"could not be put to sleep: the daemon is gone.*bring_back"), generation(gpus):
        gpus.sleep = unreachable  # type: ignore[method-assign]
    assert gpus.here == [False]


def test_a_server_lost_in_the_generation_is_an_error_unless_it_is_gone() -> None:
    gpus = Gpus(servers=3)
    gpus.running["servers/2"].state, gpus.running["servers/2"].power = Server.LOST, Power.AWAKE
    gpus.stuck = {"servers/2"}  # lost long ago: nothing to do with this generation
    with generation(gpus) as held:
        assert held.servers == ("host:0", "host:1")

    def lose(name: str) -> None:
        gpus.stuck |= {name}
        gpus.running[name].state = Server.LOST

    with pytest.raises(ServersNotAsleep, match=r"servers/0: LOST.*its lease ended in this generation"), generation(gpus):
        lose("servers/0")
    assert gpus.here == [False]
    with generation(gpus):
        pass
    with generation(gpus):
        del gpus.running["servers/1"]
        gpus.running["servers/3"] = Server(name="servers/3", state=Server.SERVING, power=Power.AWAKE, version=7)
    assert gpus.here == [True]


def test_servers_that_a_restarted_daemon_awaits_may_be_awake() -> None:
    gpus = Gpus()

    def restart() -> None:
        del gpus.running["servers/1"]
        gpus.policy.returning.append("servers/1")

    with (
        pytest.raises(ServersNotAsleep, match=r"servers/1: has not returned since the daemon's restart"),
        generation(gpus, timeout=SHORT),
    ):
        restart()
    assert gpus.here == [False]
    with pytest.raises(ServersNotAsleep) as caught, generation(gpus, timeout=SHORT):
        pytest.fail("not every server serves the version")
    assert isinstance(caught.value.__context__, WaitTimeout)
    del gpus.policy.returning[:]
    with generation(gpus):
        pass
    assert gpus.here == [True]


RANKS = 3


def tcp_stores(ranks: int) -> list[Store]:
    """Each rank's own connection to one."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [server, *(TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(ranks - 1))]
    return [PrefixStore("default_pg/0", store) for store in stores]


@pytest.mark.parametrize("failing", [None, *((rank, where) for rank in (0, 2) for where in ("publish", "offloaded", "body"))])
def test_no_rank_and_no_server_is_ever_in_the_others_memory(failing: tuple[int, str] | None) -> None:
    """Ranks come and leave late, each at a time of its own; one of them fails; then all meet again."""
    gpus, stores = Gpus(RANKS), tcp_stores(RANKS)

    def run(rank: int) -> list[str]:
        def reach(where: str) -> None:
            if (rank, where) == failing and not ends:
                raise ZeroDivisionError

        ends: list[str] = []
        for number in (1, 2):
            time.sleep(0.1 * ((rank + number) % RANKS))
            try:
                with generation(gpus, rank=rank, store=stores[rank], number=number, reach=reach):
                    time.sleep(0.1 * (RANKS - rank))
                    reach("body")
                ends.append("well")
            except (ZeroDivisionError, GenerationEnded) as error:
                ends.append(type(error).__name__)
        return ends

    first, second = zip(*together(run, RANKS), strict=True)
    assert gpus.violations == []
    assert gpus.here == [True] * RANKS
    assert stores[0].num_keys() <= 2 * RANKS + 4, "words of the first meeting are forgotten"
    assert all(server.power == Power.ASLEEP_2 for server in gpus.running.values())
    assert set(second) == {"well"}
    if failing is None:
        assert set(first) == {"well"}
        return
    rank, where = failing
    assert first[rank] == "ZeroDivisionError"
    others = {end for other, end in enumerate(first) if other != rank}
    assert others <= ({"well", "GenerationEnded"} if where == "body" else {"GenerationEnded"})


def test_servers_stay_awake_until_the_last_rank_has_left() -> None:
    gpus, store = Gpus(2), HashStore()
    asked = threading.Event()

    def run(rank: int) -> None:
        with generation(gpus, rank=rank, store=store, timeout=LONG):
            if rank == 1:
                assert asked.wait(LONG)
                assert all(server.state == Server.SERVING for server in gpus.running.values())

    def let_go() -> None:
        end = time.monotonic() + LONG
        while store.add("job/1/left", 0) < 1 and time.monotonic() < end:
            time.sleep(0.01)
        asked.set()

    together(lambda number: run(number) if number < 2 else let_go(), 3)
    assert gpus.violations == []


def test_a_rank_that_is_interrupted_waits_for_a_wake_that_is_on_its_way() -> None:
    gpus, store = Gpus(2), HashStore()
    waking, back = threading.Event(), threading.Event()

    def wake() -> None:
        waking.set()
        wait_until(lambda: store.add("job/1/failed", 0) > 0, "the interrupted rank has said so")
        back.wait(1)  # a rank that came back now would meet the servers in its memory

    class Interrupted(Ranks):
        interrupted = False

        def reported(self, event: str) -> int:
            if event == "settled" and not self.interrupted:
                self.interrupted = True
                assert waking.wait(LONG)
                raise KeyboardInterrupt
            return super().reported(event)

    def run(rank: int) -> None:
        kind, error = (Ranks, GenerationEnded) if rank == 0 else (Interrupted, KeyboardInterrupt)
        with pytest.raises(error), generation(gpus, rank=rank, store=store, kind=kind):
            pass
        back.set()

    gpus.before_wake = wake
    together(run, 2)
    assert gpus.violations == []
    assert gpus.here == [True, True]


def test_ranks_that_do_not_come_are_named() -> None:
    gpus = Gpus(3)
    store = HashStore()
    Ranks(store, 1, 3, "job", 1).report("offloaded")
    with (
        pytest.raises(WaitTimeout, match=r"waited 0\.5 s for every rank to join this generation: ranks 2 have not"),
        generation(gpus, store=store, timeout=SHORT),
    ):
        pass
    assert "AWAKE" not in gpus.log


def test_several_ranks_without_torch_distributed_are_refused() -> None:
    with pytest.raises(UsageError, match=r"torch\.distributed, which is not initialised over all 2 ranks"):
        meet(RankIdentity("job", 0, 2), "policy")


def test_on_the_direct_path_weights_wake_before_memory_is_offloaded_and_the_rest_after() -> None:
    gpus = Gpus()
    with generation(gpus, direct=True):
        gpus.log.append("body")
    assert gpus.log == ["WEIGHTS_AWAKE", "offloaded", "AWAKE", "body", "ASLEEP_2", "back"]


def test_weights_do_not_wake_before_every_rank_has_entered() -> None:
    gpus, store = Gpus(2), HashStore()
    entered: list[int] = []

    def run(rank: int) -> None:
        if rank == 1:
            time.sleep(0.5)
            assert gpus.log == [], "rank 1 still trains"
            entered.append(rank)
        with generation(gpus, rank=rank, store=store, direct=True):
            pass

    together(run, 2)
    assert entered == [1]
    assert gpus.violations == []
    assert sorted(gpus.log[: gpus.log.index("AWAKE")]) == ["WEIGHTS_AWAKE", "offloaded", "offloaded"]


@pytest.mark.parametrize(("where", "log"), [("publish", []), ("published", ["WEIGHTS_AWAKE", "ASLEEP_2", "back"])])
def test_a_rank_that_fails_on_the_direct_path_puts_servers_to_sleep_if_their_weights_woke(where: str, log: list[str]) -> None:
    gpus = Gpus()

    def reach(here: str) -> None:
        if here == where:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), generation(gpus, direct=True, reach=reach):
        pass
    assert gpus.log == log


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("where", ["publish", "published", "offloaded", "body"])
def test_ranks_that_fail_on_the_direct_path_leave_every_server_asleep(failing: int, where: str) -> None:
    gpus, stores = Gpus(RANKS), tcp_stores(RANKS)

    def run(rank: int) -> str:
        def reach(here: str) -> None:
            if (rank, here) == (failing, where):
                raise ZeroDivisionError

        try:
            with generation(gpus, rank=rank, store=stores[rank], reach=reach, direct=True):
                reach("body")
        except (ZeroDivisionError, GenerationEnded) as error:
            return type(error).__name__
        return "well"

    ends = together(run, RANKS)
    assert ends[failing] == "ZeroDivisionError"
    assert gpus.violations == []
    assert gpus.here == [True] * RANKS
    assert all(server.power == Power.ASLEEP_2 for server in gpus.running.values())

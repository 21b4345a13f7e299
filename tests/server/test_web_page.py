"""The status page in a real Chromium, before a real daemon."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from resharder.client.cli import format
from resharder.client.cli.format import fleet_health
from resharder.client.operator import Operator
from resharder.v1 import node_pb2, node_pb2_grpc, publisher_pb2

from tests.support.browser import NARROW, WIDE, browser, needs_browser, resize, text
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.page_scenes import SCENES, scene
from tests.support.populated_daemon import job, populated, publish, upload_half
from tests.support.ports import free_port
from tests.support.publishing import Job
from tests.support.simulated_server import SimulatedServer

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.process  # Chromium
CLOSED = ("net::ERR_EMPTY_RESPONSE", "net::ERR_CONNECTION_RESET", "net::ERR_CONNECTION_CLOSED")
HOSTILE = "<img src=x onerror=\"document.title='owned'\">&amp;<script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chrome]":
    needs_browser()
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    needs_browser()
    with Daemon(web_listen=f"127.0.0.1:{free_port()}", lease_seconds=600) as running:
        yield running


def open_page(page: "Chrome", daemon: Daemon) -> None:
    page.get(f"http://{daemon.options['web_listen']}/")
    wait_until(lambda: text(page, "#link") == "live", "the page is drawn")


def rows(page: "Chrome", fleet: str) -> dict[str, list[str]]:
    """The cells of each server of a fleet."""
    found: list[list[str]] = page.execute_script(
        "return [...document.querySelectorAll(`[data-fleet='${arguments[0]}'] tbody tr`)].map("
        "row => [...row.children].map(cell => cell.innerText))",
        fleet,
    )
    return {cells[0]: cells[1:] for cells in found}


def problems(page: "Chrome") -> list[Any]:
    """Return Chromium's log entries: errors of scripts, refused requests, and violations of the content policy.

    Chromium opens connections ahead. The daemon closes one that has been unused for CONNECTION_SECONDS, which a busy machine
    takes to use it, and Chromium logs that, for instance of the icon.
    """
    return [
        entry
        for entry in page.get_log("browser")
        if "/api/status" not in entry["message"] and not entry["message"].endswith(CLOSED)
    ]


def differences(page: "Chrome", operator: Operator) -> list[object]:
    """Between what the page says and what operators are told."""
    found: list[object] = []
    for fleet in operator.fleets():
        line, shown = text(page, f"[data-health='{fleet.name}']"), rows(page, fleet.name)
        said = (fleet.reason, fleet_health(fleet, operator.servers()).badge.text)
        found += [] if all(part in line for part in said) else [(fleet.name, said, line)]
        servers = {}
        for server in operator.servers(fleet.name):
            numbers = [server.version] + [server.wanted_version] * (server.version != server.wanted_version)
            state, version = format.state(server), " → ".join(map(str, numbers))
            servers[server.name.removeprefix("servers/")] = (state, version, server.reason, str(server.in_flight))
        seen = {id: (state, version, why, requests) for id, (state, version, why, _, requests, _) in shown.items()}
        found += [] if seen == servers else [(fleet.name, servers, seen)]
    lines = page.execute_script("return [...document.querySelectorAll('#models .line:not(.axis)')].map(line => line.innerText)")
    listed = [version for model in operator.daemon().models for version in operator.versions(model)]
    numbers_and_states = [(str(version.number), version.state.value) for version in listed]
    drawn = [(words[0], next(word for word in words if word.isupper())) for words in map(str.split, lines)]
    return found + ([] if drawn == numbers_and_states else [(numbers_and_states, drawn)])


def test_it_shows_what_the_daemon_says_of_fleets_servers_versions_and_what_moves(page: "Chrome") -> None:
    with (
        Daemon(web_listen=f"127.0.0.1:{free_port()}", lease_seconds=600) as busy,
        populated(busy),
        Operator(busy.endpoint) as operator,
    ):
        open_page(page, busy)
        with suppress(TimeoutError):
            wait_until(lambda: not differences(page, operator), "both say the same")
        assert differences(page, operator) == []
        assert len(operator.fleets()) == 4
        rollouts = rows(page, "policy")
        assert rollouts["rollout-0"][3] == "staged in 412 ms (7.01 GiB/s), paused for 206 ms (applying 161 ms, waiting 45 ms)"
        assert "1 (1 version, " in text(page, "[data-health='policy']"), "it is said how far a fleet lags"
        assert "failed 3 times" in rollouts["rollout-2"][2], "and why a server does"
        assert "HOLDING" in text(page, "[data-health='tried']")
        assert "3 → 4, 1 of 2 servers there" in text(page, "#moving")
        moving = text(page, "#moving")
        assert "models/draft/versions/2" in moving
        assert "2.0 MiB of 4.0 MiB, 0 of 1 slot sealed" in moving
        assert text(page, "#events").count("\n") > 10
        assert "fleet policy: 1 of 3 servers gave up an install: servers/rollout-2: " in text(page, "#problems")
        assert text(page, "[data-health] .chip.bad") == "1 FAILED", "the fleet in trouble is the first one"
        assert next(iter(rollouts)) == "rollout-2"
        assert not problems(page)


def test_what_happens_is_seen_without_a_reload(page: "Chrome", daemon: Daemon) -> None:
    seen = job(daemon, "seen")
    publish(seen, 1)
    with SimulatedServer(daemon, "watched", fleet="seen", model="seen") as server:
        open_page(page, daemon)
        wait_until(lambda: rows(page, "seen").get("watched", ["", ""])[1] == "1", "version 1 is served")
        page.execute_script("window.since = 'the same page'")
        publish(seen, 2)
        wait_until(lambda: rows(page, "seen")["watched"][:2] == ["SERVING", "2"], "version 2 is served")
        server.in_flight = 5
        wait_until(lambda: rows(page, "seen")["watched"][4] == "5", "requests are counted")
        version = upload_half(seen, 3)
        wait_until(lambda: version.name in text(page, "#moving"), "a version arrives")
        assert page.execute_script("return window.since") == "the same page"
    assert not problems(page)


def test_a_daemon_that_is_away_is_said_and_its_return_is_seen(page: "Chrome", daemon: Daemon) -> None:
    with Daemon(web_listen=f"127.0.0.1:{free_port()}") as other:
        open_page(page, other)
        other.kill()
        wait_until(lambda: text(page, "#away").startswith("The daemon is not reachable. It last answered at"), "the page says so")
        assert text(page, "#link") == "not connected"
        assert text(page, "#store").startswith("store:"), "what was known stays"
        other.start()
        wait_until(lambda: text(page, "#link") == "live", "the page follows again")
        assert text(page, "#away") == ""


def test_names_and_reasons_are_text_whatever_stands_in_them(page: "Chrome", daemon: Daemon) -> None:
    """Names of models, servers and fleets have no such letters; jobs, reasons and errors of workers may have any."""
    hostile = job(daemon, "hostile", HOSTILE)
    publish(hostile, 1)
    with SimulatedServer(daemon, "victim", fleet="hostile", model="hostile") as server:
        server.broken, server.error = {2}, HOSTILE
        publish(hostile, 2)
        abort(hostile, HOSTILE)
        open_page(page, daemon)
        wait_until(lambda: HOSTILE in rows(page, "hostile")["victim"][2], "the error is shown as it is")
        assert HOSTILE in text(page, "#models"), "and the job"
        wait_until(lambda: HOSTILE in text(page, "#events"), "and the reason of an event")
        assert page.title == "Resharder"
        assert not page.execute_script("return document.querySelectorAll('main img, main script').length")
        assert not problems(page)


def test_a_node_its_versions_and_its_problem_are_shown(page: "Chrome", daemon: Daemon) -> None:
    shown = job(daemon, "hosted")
    publish(shown, 1)
    version = node_pb2.NodeVersion(version="models/hosted/versions/1", folder="/dev/shm/gpu-7", problem="memory full")
    stub = node_pb2_grpc.NodeServiceStub(daemon.channel)
    stub.SyncNode(node_pb2.SyncNodeRequest(node="nodes/gpu-7", instance="i", capacity_bytes=1 << 30, versions=[version]))
    open_page(page, daemon)
    wait_until(lambda: "models/hosted/versions/1: memory full" in text(page, "#nodes"), "the node is shown")
    wait_until(lambda: "node gpu-7: models/hosted/versions/1 does not arrive: memory full" in text(page, "#problems"), "and why")
    stub.SyncNode(node_pb2.SyncNodeRequest(node="nodes/gpu-7", instance="i", leaving=True))
    wait_until(lambda: not page.execute_script("return document.getElementById('nodes').getClientRects().length"), "it has left")
    assert not problems(page)


def abort(job: Job, reason: str) -> None:
    version = job.begin(9)
    job.stub.AbortVersion(publisher_pb2.AbortVersionRequest(version=version.name, epoch=job.epoch, reason=reason))


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["1280", "390"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_wide_and_narrow_light_and_dark(
    page: "Chrome", daemon: Daemon, size: tuple[int, int], dark: bool, tmp_path: Path
) -> None:
    shown = job(daemon, "readable")
    publish(shown, 1, 2)
    with ExitStack() as stack:
        stack.callback(resize, page, WIDE)
        stack.enter_context(SimulatedServer(daemon, "readable-0", fleet="readable", model="readable"))
        resize(page, size, dark=dark)
        open_page(page, daemon)
        wait_until(lambda: "readable-0" in rows(page, "readable"), "the server is shown")
        headings = page.execute_script(
            "return [...document.querySelectorAll('thead, .axis > span')].filter(one => one.getClientRects().length && "
            "!getComputedStyle(one).clipPath.startsWith('inset')).length"
        )
        assert bool(headings) == (size == WIDE), "on a phone no heading stands without its column"
        names = page.execute_script("return [...document.querySelectorAll('tbody th')].map(name => name.offsetHeight)")
        assert size == WIDE or max(names) < 40, "on a phone a server's name has a line to itself"
        width = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert width[0] <= width[1] == size[0], "nothing is to be scrolled sideways to"
        colours = page.execute_script(
            "return ['.card', '.soft', '.chip.good', '.chip.busy', '.chip.idle', '#link'].flatMap(which => {"
            "  const found = document.querySelector(which);"
            "  if (!found) return [];"
            "  let behind = found;"
            "  while (getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') behind = behind.parentElement;"
            "  return [[which, getComputedStyle(found).color, getComputedStyle(behind).backgroundColor]]; })"
        )
        for which, text_colour, back in colours:
            assert contrast(text_colour, back) >= 4.5, (which, text_colour, back)  # WCAG 2.1, level AA
        assert (light(colours[0][2]) < 0.5) == dark


def open_scene(page: "Chrome", url: str) -> None:
    page.get(url)
    wait_until(lambda: text(page, "#link") == "live", "the page is drawn")


def test_the_page_leads_with_the_health_of_each_fleet_then_moves_versions_and_events(page: "Chrome") -> None:
    with scene("ten models") as shown:
        open_scene(page, shown.url)
        titles = page.execute_script("return [...document.querySelectorAll('h2')].map(title => title.innerText)")
        assert titles[:4] == ["Fleets", "Moves", "Versions", "Events"]
        lines = page.execute_script("return [...document.querySelectorAll('[data-health]')].map(line => line.innerText)")
        assert len(lines) == 9
        assert " ".join(lines[0].split()).startswith("policy-8b HOLDING 2 of 2 4 1 (1 version, ")
        assert "FINISHED" in text(page, "#models"), "an import that has ended"
        assert "GONE" not in text(page, "#models")
        assert not problems(page)


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("a failed install", "2 FAILED", "fleet policy: 1 of 3 servers FAILED: servers/rollout-2: "),
        ("a lost server", "1 LOST", "fleet policy: 1 of 2 servers LOST: servers/left: "),
        ("a stopped move", "1 FAILED, STOPPED", "fleet policy: its move has STOPPED: from version 3 to 4, 1 of 3 servers there"),
        ("twenty servers", "1 LOST", "fleet policy: 1 of 20 servers LOST: servers/policy-rollout-replica-19: "),
    ],
)
def test_failure_is_red(page: "Chrome", name: str, word: str, sentence: str) -> None:
    colours = (
        "const red = getComputedStyle(document.documentElement).getPropertyValue('--bad');"
        "const probe = document.body.appendChild(document.createElement('i')); probe.style.color = red;"
        "const colour = getComputedStyle(probe).color; probe.remove();"
        "return [...document.querySelectorAll(arguments[0])].filter(one => getComputedStyle(one).color === colour)"
        ".map(one => one.innerText)"
    )
    with scene(name) as shown:
        open_scene(page, shown.url)
        assert word in page.execute_script(colours, ".chip")
        assert any(alarm.startswith(sentence) for alarm in page.execute_script(colours, ".alarm"))


def test_an_event_names_the_versions_it_goes_from_and_to_and_how_long_ago_it_was(page: "Chrome") -> None:
    with scene("a stopped move") as shown:
        open_scene(page, shown.url)
        first, second = text(page, ".events li:nth-child(1)"), text(page, ".events li:nth-child(2)")
        assert "stopped (3 → 4, strategy rolling): it failed on servers/rollout-1" in first
        assert "moving (3 → 4, strategy rolling)" in second
        times = page.execute_script("return [...document.querySelectorAll('time')].map(time => [time.innerText, time.title])")
        assert all(re.fullmatch(r"now|\d+ (s|min|h|d) ago", ago) for ago, _ in times), times
        assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ", absolute) for _, absolute in times), times


@pytest.mark.parametrize("name", SCENES)
def test_nothing_is_cut_off_and_no_version_breaks_its_line(page: "Chrome", name: str) -> None:
    with scene(name) as shown, ExitStack() as stack:
        stack.callback(resize, page, WIDE)
        open_scene(page, shown.url)
        cut = "return [...document.querySelectorAll('.line .name')].filter(name => name.scrollWidth > name.clientWidth).length"
        assert not page.execute_script(cut), "under its bar"
        resize(page, NARROW)
        assert page.execute_script("return document.documentElement.scrollWidth") <= NARROW[0]
        heights = page.execute_script("return [...document.querySelectorAll('.line .name')].map(name => name.offsetHeight)")
        assert heights
        assert max(heights) < 30, "one line each"
        assert not problems(page)


def light(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`, by WCAG 2.1."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)

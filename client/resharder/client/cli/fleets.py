"""Commands on fleets and their servers: settings, moves between versions, sleep and wake, drain and resume.

An action ends at once, or with `--wait` after its effect.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Annotated

import typer
from resharder.client.cli import complete, format
from resharder.client.cli.app import WENT_WRONG, AsJson, Endpoint, FleetName, Reason, Section, Timeout, Wait, Wide, app, command
from resharder.client.cli.format import move_lines, time_of
from resharder.client.cli.terminal import console, print_json, print_line, print_stderr, print_table
from resharder.client.cli.watch import print_problems, watch_move
from resharder.client.errors import NotFound, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import (
    BaseBinding,
    Fleet,
    Move,
    PauseMode,
    Power,
    ServeAhead,
    Server,
    UpdateStrategy,
    VersionTarget,
)
from resharder.client.operator.convert import plain
from resharder.client.operator.waiting import FleetListener, went_well

fleet = typer.Typer(no_args_is_help=True, help="Create, change and show fleets.", rich_markup_mode=None)
app.add_typer(fleet, name="fleet", rich_help_panel=Section.MOVE)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Not needed if the daemon has one fleet.", autocompletion=complete.fleets)
]
Number = Annotated[int, typer.Argument(metavar="N", min=0, help="A version's number.", autocompletion=complete.numbers)]
AcceptRefused = Annotated[bool, typer.Option("--accept-refused", help="Allow versions that failed moves and rollbacks refused.")]
ServerName = Annotated[
    str, typer.Option("--server", metavar="ID", help="Only this server, by its id.", autocompletion=complete.servers)
]
Act = Callable[[Operator, str, str], Fleet]
"""Function of the fleet's name, and servers/{id} or nothing for all of them."""
Until = Callable[[Operator, str, str, FleetListener, float | None], object]
"""The same, with a listener and seconds."""
PAUSE_MODES = {mode.lower(): mode for mode in PauseMode if mode != PauseMode.UNSPECIFIED}


def _pause_mode(text: str) -> PauseMode:
    if text not in PAUSE_MODES:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, PAUSE_MODES))}.")
    return PAUSE_MODES[text]


class Binding(str, Enum):
    """Values of --base-binding."""

    HOLD = "hold"
    WARN = "warn"


@fleet.command("set")
def set_(
    name: Name = "",
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Model of a new fleet.", autocompletion=complete.models)
    ] = "",
    want: Annotated[
        str, typer.Option("--want", metavar="latest|N|none", help="Version to serve; none: keep the present one.")
    ] = "",
    every: Annotated[
        float | None, typer.Option("--every", metavar="SECONDS", min=0, help="Minimum time between two moves.")
    ] = None,
    all_at_once: Annotated[bool, typer.Option("--all-at-once", help="Update servers independently.")] = False,
    rolling: Annotated[
        int | None, typer.Option("--rolling", metavar="N", min=1, help="Update at most N servers at a time.")
    ] = None,
    max_failures: Annotated[
        int | None, typer.Option("--max-failures", metavar="M", min=1, help="Stop after M failures; by default 1.")
    ] = None,
    canary: Annotated[
        int | None,
        typer.Option("--canary", metavar="K", min=1, help="Update K servers first, then the others, or roll back."),
    ] = None,
    hold: Annotated[
        float | None, typer.Option("--hold", metavar="SECONDS", min=0, help="Time that canaries serve before the others.")
    ] = None,
    approve: Annotated[
        bool, typer.Option("--approve", help="Wait for `resharder approve` or `back` after the canaries.")
    ] = False,
    check: Annotated[
        str, typer.Option("--check", metavar="NAME", help="Wait for this check of the daemon's configuration to pass.")
    ] = "",
    atomic: Annotated[bool, typer.Option("--atomic", help="Switch all servers at once, or none.")] = False,
    pause_mode: Annotated[
        PauseMode | None,
        typer.Option(
            "--pause-mode",
            parser=_pause_mode,
            metavar=f"<{'|'.join(PAUSE_MODES)}>",
            help="Requests in flight: freeze and continue them, finish them first, or abort them.",
            autocompletion=lambda incomplete: [mode for mode in PAUSE_MODES if mode.startswith(incomplete)],
        ),
    ] = None,
    max_skew: Annotated[
        int | None,
        typer.Option("--max-skew", metavar="N", min=0, help="Largest gap between versions served at once; 0: no bound."),
    ] = None,
    serve_ahead: Annotated[
        bool | None,
        typer.Option("--serve-ahead/--no-serve-ahead", help="Serve versions before they are READY, over the direct path."),
    ] = None,
    serve_ahead_auto: Annotated[
        bool, typer.Option("--serve-ahead-auto", help="Serve ahead with --all-at-once and no skew bound (default).")
    ] = False,
    base_binding: Annotated[
        Binding | None,
        typer.Option("--base-binding", help="An adapter whose base is at another version than it was trained on."),
    ] = None,
    accept_refused: AcceptRefused = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Set a fleet's target and update strategy; other settings stay. A new NAME with --model creates a fleet.

    \b
    resharder fleet set --rolling 2 --max-failures 1
    resharder fleet set --canary 1 --hold 60 --approve --rolling 4
    resharder fleet set tests --model policy --want 12 --pause-mode wait
    """
    target = target_of(want or "latest", every) if want or every is not None else None
    strategy = strategy_of(
        all_at_once=all_at_once, rolling=rolling, canary=canary, atomic=atomic, max_failures=max_failures, hold=hold,
        approve=approve, check=check,
    )  # fmt: skip
    if serve_ahead_auto and serve_ahead is not None:
        raise UsageError("pass only one of --serve-ahead, --no-serve-ahead and --serve-ahead-auto")
    ahead = ServeAhead.AUTO if serve_ahead_auto else serve_ahead
    binding = BaseBinding[base_binding.name] if base_binding else None
    given = (target, strategy, pause_mode, max_skew, ahead, binding)
    if not model and not accept_refused and all(value is None for value in given):
        raise UsageError("nothing to set was given: see resharder fleet set --help")
    with Operator(endpoint) as operator:
        name = name if model else _known(operator, name)
        asked = operator.set_fleet(
            name,
            target=target,
            strategy=strategy,
            pause_mode=pause_mode,
            max_skew=max_skew,
            serve_ahead=ahead,
            base_binding=binding,
            model=model,
            accept_refused=accept_refused,
        )
    if as_json:
        return print_json(plain(asked))
    facts = dict(_facts(asked))
    titles = ("wants", "moves", "pause mode", "max skew", "serves", "base")
    done = [f"{title} {facts[title]}" for title, value in zip(titles, given, strict=True) if value is not None]
    done += [f"model {asked.model}"] * bool(model) + ["refused versions are allowed"] * accept_refused
    print_line(f"{format.outcome(asked)}; set: {'; '.join(done)}")


@fleet.command("show")
def show_(
    name: Name = "",
    watch: Annotated[bool, typer.Option("--watch", help="Show only the move, until Ctrl-C.")] = False,
    wide: Wide = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Show a fleet: target, update strategy, last move, refused versions, servers. A move in progress is drawn."""
    if watch and not as_json:
        return watch_move(name, endpoint)
    with Operator(endpoint) as operator:
        found = operator.fleet(name)
        servers = operator.servers(found.name)
    if as_json:
        return print_json({"fleet": plain(found), "servers": [*map(plain, servers)]})
    print_problems(servers, [found])
    for title, value in _facts(found):
        print_line(f"{title:<11} {value}")
    print_line()
    if found.move and found.move.state not in (Move.State.DONE, Move.State.FAILED):
        for line in (*move_lines(found, servers, console().width), ""):
            print_line(line)
    print_table(format.SERVERS, format.server_rows(servers), wide)


@fleet.command("delete")
def delete_(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A fleet without servers.", autocompletion=complete.fleets)],
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Delete a fleet without servers. A model's default fleet has default settings from then on."""
    with Operator(endpoint) as operator:
        operator.delete_fleet(name)
    print_json({"deleted": name}) if as_json else print_line(f"{name}: deleted")


@command(Section.MOVE)
def update(
    version: Annotated[str, typer.Argument(metavar="latest|N", autocompletion=complete.versions)] = "latest",
    fleet: FleetName = "",
    accept_refused: AcceptRefused = False,
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Update a fleet to the latest version and later ones, or to version N, by the strategy of `fleet set`."""
    target = target_of(version)
    with Operator(endpoint) as operator:
        if target.kind == VersionTarget.Kind.NONE:
            asked = operator.set_fleet(operator.fleet(fleet).name, target=target, accept_refused=accept_refused)
        else:
            asked = operator.update(fleet, target.version or None, accept_refused=accept_refused)
        _end_move(operator, asked, wait, timeout, as_json)


@command(Section.MOVE)
def pin(
    version: Number = 0,
    fleet: FleetName = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Pin a fleet to version N, or to the one it serves now, until `update`."""
    with Operator(endpoint) as operator:
        _end_move(operator, operator.pin(fleet, version or None), wait, timeout, as_json)


@command(Section.MOVE)
def rollback(
    version: Number = 0,
    fleet: FleetName = "",
    reason: Reason = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Return a fleet to the previous version, or to N. Later versions are then refused: `latest` skips them."""
    with Operator(endpoint) as operator:
        _end_move(operator, operator.rollback(fleet, version or None, reason=reason), wait, timeout, as_json)


@command(Section.MOVE)
def approve(
    fleet: FleetName = "",
    reason: Reason = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Complete a move that waits after its canaries, or has STOPPED."""
    with Operator(endpoint) as operator:
        _end_move(operator, operator.approve(fleet, reason=reason), wait, timeout, as_json)


@command(Section.MOVE)
def back(
    fleet: FleetName = "",
    reason: Reason = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """End a move by returning to the previous version. Its version is then refused: `latest` skips it."""
    with Operator(endpoint) as operator:
        _end_move(operator, operator.back(fleet, reason=reason), wait, timeout, as_json, back=True)


def _known(operator: Operator, name: str) -> str:
    """Return a fleet that exists, so that a typing error creates none. Raises NotFound."""
    if name in operator.daemon().models:  # its default fleet, with or without servers
        return name
    try:
        return operator.fleet(name).name
    except NotFound as error:
        raise NotFound(f"{error}. To create it, pass --model MODEL") from error


def _facts(fleet: Fleet) -> list[tuple[str, str]]:
    """Return the facts about a fleet, with titles."""
    move, facts = fleet.move, [("fleet", fleet.name), ("model", fleet.model), ("wants", format.target(fleet.target))]
    facts += [("now", f"version {fleet.wanted_version}" if fleet.wanted_version else "no version yet")]
    facts += [("at", f"version {fleet.settled_version}" if fleet.settled_version else "no version yet")]
    facts += [("moves", format.strategy(fleet.strategy)), ("pause mode", fleet.pause_mode.lower())]
    facts += [("max skew", str(fleet.max_skew) if fleet.max_skew else "no bound")]
    facts += [("serves", format.serves(fleet)), *format.binding(fleet)]
    facts += [("power", fleet.power.value)]
    if move:
        facts += [(f"move {move.id}", f"{format.move(move)}, since {time_of(move.start_time)}; {move.reason}".rstrip("; "))]
        facts += [("failed", f"servers/{server}: {error}") for server, error in sorted(move.failed.items())]
    facts += [("refused", f"version {refusal.version}: {refusal.reason}") for refusal in fleet.refused]
    return [*facts, ("reason", fleet.reason)]


class Tag(str, Enum):
    """Values of --tag: vLLM's tag of the memory to wake."""

    WEIGHTS = "weights"


@command(Section.MAINTAIN)
def sleep(
    fleet: FleetName = "",
    server: ServerName = "",
    level: Annotated[
        int,
        typer.Option("--level", min=1, max=2, help="1 keeps the weights in host memory; 2 drops them, `wake` installs them."),
    ] = 1,
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Put servers to sleep: they free their GPU memory and answer 503 until `wake`.

    The fleet's pause mode decides what happens to requests in progress. With --fleet, servers that join later sleep too.
    """
    _require_name(fleet, server)
    power = Power.ASLEEP_1 if level == 1 else Power.ASLEEP_2
    _maintain(
        lambda operator, name, one: operator.sleep(name, one, level=level),
        _at(power),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def forget(
    server: Annotated[str, typer.Argument(metavar="ID", help="A lost server.", autocompletion=complete.servers)],
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Forget a lost server now, instead of `forget_seconds` after its loss. If it returns, it is registered again."""
    with Operator(endpoint) as operator:
        operator.forget(server)
    print_json({"forgotten": server}) if as_json else print_line(f"{server}: forgotten")


@command(Section.MAINTAIN)
def wake(
    fleet: FleetName = "",
    server: ServerName = "",
    tag: Annotated[Tag | None, typer.Option("--tag", help="Wake only these; `wake` without it wakes the rest.")] = None,
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Wake servers. They serve after their fleet's current version is installed and verified."""
    _maintain(
        lambda operator, name, one: operator.wake(name, one, tag="weights" if tag else None),
        _at(Power.WEIGHTS_AWAKE if tag else Power.AWAKE),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def drain(
    fleet: FleetName = "",
    server: ServerName = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Take servers out of service: they finish their requests and answer 503 to new ones until `resume`.

    For maintenance: a drained server keeps its weights and GPU memory. --wait ends with the last request.
    """
    _require_name(fleet, server)
    _maintain(
        Operator.drain,
        lambda operator, name, one, listener, seconds: operator.wait_drained(name, one, listener, timeout=seconds),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


@command(Section.MAINTAIN)
def resume(
    fleet: FleetName = "",
    server: ServerName = "",
    wait: Wait = False,
    timeout: Timeout = 0,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Accept requests again, after `drain`."""
    _maintain(
        Operator.resume,
        lambda operator, name, one, listener, seconds: operator.wait_serving(name, one, listener, timeout=seconds),
        fleet, server, wait, timeout, endpoint, as_json,
    )  # fmt: skip


def _at(power: Power) -> Until:
    return lambda operator, name, one, listener, seconds: operator.wait_power(name, power, one, listener, timeout=seconds)


def _require_name(fleet: str, server: str) -> None:
    """Guard against taking all servers out of service by omission. Raises UsageError."""
    if not fleet and not server:
        raise UsageError("servers stop answering: pass --server ID, or --fleet NAME for all of its servers")


def target_of(text: str, every: float | None = None) -> VersionTarget:
    """Return the target for `latest`, a version's number, or `none`. `every` is the least interval between moves in seconds."""
    if every is not None and text != "latest":
        raise UsageError(f"--every needs the target `latest`, not {text!r}")
    if text.isdigit() and int(text):
        return VersionTarget(VersionTarget.Kind.NUMBER, int(text))
    kinds = {"latest": VersionTarget.Kind.LATEST, "none": VersionTarget.Kind.NONE}
    if text not in kinds:
        raise UsageError(f"expected `latest`, a version's number or `none`, got {text!r}")
    return VersionTarget(kinds[text], every_seconds=every or 0.0)


def strategy_of(
    *,
    all_at_once: bool = False,
    rolling: int | None = None,
    canary: int | None = None,
    atomic: bool = False,
    max_failures: int | None = None,
    hold: float | None = None,
    approve: bool = False,
    check: str = "",
) -> UpdateStrategy | None:
    """Return the update strategy; None without an option about it. Raises UsageError for contradictions."""
    ways = [all_at_once, rolling is not None or canary is not None, atomic]
    if sum(ways) > 1:
        raise UsageError(
            "pass only one of --all-at-once, --rolling N, --canary K and --atomic (--canary K --rolling N go together)"
        )
    if canary is None and (hold is not None or approve or check):
        raise UsageError("--hold, --approve and --check say when the other servers follow the canaries: pass --canary K too")
    if max_failures is not None and not ways[1]:
        raise UsageError("--max-failures needs --rolling N or --canary K")
    if not any(ways):
        return None
    if canary is not None:
        return UpdateStrategy(
            UpdateStrategy.Kind.CANARY, canaries=canary, at_a_time=rolling or 0, max_failures=max_failures or 0,
            hold_seconds=hold or 0, approval=approve, check=check,
        )  # fmt: skip
    if rolling is not None:
        return UpdateStrategy(UpdateStrategy.Kind.ROLLING, at_a_time=rolling, max_failures=max_failures or 0)
    return UpdateStrategy(UpdateStrategy.Kind.ATOMIC if atomic else UpdateStrategy.Kind.ALL_AT_ONCE)


def _end_move(operator: Operator, asked: Fleet, wait: bool, timeout: float, as_json: bool, back: bool = False) -> None:
    """Exit WENT_WRONG if the move ended FAILED or STOPPED; with `back`, unless it ended FAILED."""
    wait = wait or timeout > 0
    fleet = operator.wait_moved(asked, _on_change(format.progress, as_json), timeout=timeout or None) if wait else asked
    _show(fleet, as_json)
    failed = fleet.move is not None and fleet.move.state == Move.State.FAILED
    as_asked = failed if back else went_well(asked, fleet)
    if wait and not as_asked:
        raise typer.Exit(WENT_WRONG)


def _show(fleet: Fleet, as_json: bool) -> None:
    """Print a fleet, as JSON or as a line about its target and version."""
    if as_json:
        return print_json(plain(fleet))
    print_line(format.outcome(fleet))


def _maintain(
    act: Act, until: Until, fleet: str, server: str, wait: bool, timeout: float, endpoint: str | None, as_json: bool
) -> None:
    """Act on the fleet or the server, wait if requested, and print the servers concerned.

    Exits WENT_WRONG if a server was lost meanwhile, since the others alone fulfil the condition.
    """
    with Operator(endpoint) as operator:
        name, one = _target(operator, fleet, server)

        def about(servers: Iterable[Server]) -> list[Server]:
            return [server for server in servers if one in ("", server.name)]

        before = {each.name for each in about(operator.servers(name)) if each.state != Server.State.LOST}
        act(operator, name, one)
        if wait or timeout:
            until(operator, name, one, _on_change(lambda fleet, servers: format.states(about(servers)), as_json), timeout or None)
        found = about(operator.servers(name))
    if as_json:
        print_json({"servers": [*map(plain, found)]})
    for each in found if not as_json else ():
        print_line(f"{each.name} {format.state(each)}: {each.reason}")
    if any(each.name in before and each.state == Server.State.LOST for each in found):
        raise typer.Exit(WENT_WRONG)


def _target(operator: Operator, fleet: str, server: str) -> tuple[str, str]:
    """Return (fleet, servers/{id} or empty). Raises UsageError, NotFound."""
    if not server:
        return operator.fleet(fleet).name, ""
    found = operator.server(server)
    if fleet and fleet != found.fleet:
        raise UsageError(f"{found.name} is not a server of fleet {fleet}: it belongs to fleet {found.fleet}")
    return found.fleet, found.name


def _on_change(line: Callable[[Fleet, Sequence[Server]], str], silent: bool) -> FleetListener:
    """Return a listener that prints a line to standard error whenever it changes."""
    before = ""

    def listener(fleet: Fleet, servers: Sequence[Server]) -> None:
        nonlocal before
        now = line(fleet, servers)
        if now != before and not silent:
            print_stderr(now)
        before = now

    return listener

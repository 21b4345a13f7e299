"""`resharder`: the operator's command, made of the operator SDK.

Exit codes: 0 done; 1 `doctor` found something that must be mended; 2 the command itself cannot work; 3 the daemon cannot be
reached; 4 the daemon refuses, or has no such thing, or what `check` was asked about does not fit.
"""

import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from resharder.client.errors import DaemonUnreachable, ResharderError, UsageError
from resharder.client.operator import Operator
from resharder.converters.errors import ConversionError
from resharder.v1 import resources_pb2
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What a Resharder daemon holds and serves, and copies of it.",
                  pretty_exceptions_enable=False, rich_markup_mode=None)  # fmt: skip
Endpoint = Annotated[str | None, typer.Option("--endpoint", envvar="RESHARDER_ENDPOINT", metavar="HOST:PORT", help="The daemon.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ModelName = Annotated[str, typer.Option("--model", help="Not needed where the daemon has one model.")]


@app.command()
def status(endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """The daemon, its store, its models and who follows them."""
    with Operator(endpoint) as operator:
        daemon, fleets, servers = operator.daemon(), operator.fleets(), operator.servers()
    if as_json:
        return _print_json({"daemon": _plain(daemon), "fleets": [*map(_plain, fleets)], "servers": [*map(_plain, servers)]})
    print(f"daemon {daemon.release} at {operator.endpoint}, started {_time(daemon.start_time)}")
    print(f"store {daemon.store_folder}: {_size(daemon.store_used_bytes)} of {_size(daemon.store_limit_bytes)} used")
    _print_table(
        ("publisher", "state", "ranks", "job"),
        (
            (p.name, resources_pb2.Publisher.State.Name(p.state), f"{p.registered_slots}/{p.world_size}", p.job)
            for p in daemon.publishers
        ),
    )
    serving = {f.name: sum(s.name in f.servers and s.version == f.wanted_version for s in servers) for f in fleets}
    _print_table(
        ("fleet", "model", "wants", "serving it"),
        ((f.name, f.model, _number(f.wanted_version), f"{serving[f.name]}/{len(f.servers)}") for f in fleets),
    )


@app.command()
def versions(model: ModelName = "", endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Every version, newest first."""
    with Operator(endpoint) as operator:
        found = sorted(operator.versions(model), key=lambda v: (v.model, -v.number))
    if as_json:
        return _print_json({"versions": [*map(_plain, found)]})
    _print_table(
        ("model", "version", "state", "step", "size", "ready", "served by", "reason"),
        (
            (
                v.model, _number(v.number), resources_pb2.Version.State.Name(v.state), str(v.step), _size(v.size_bytes),
                _time(v.ready_time) if v.HasField("ready_time") else _arrived(v),
                f"{v.servers_serving}/{v.servers_following}", v.reason,
            )
            for v in found
        ),
    )  # fmt: skip


@app.command()
def servers(
    fleet: Annotated[str, typer.Option("--fleet", help="Only of this fleet.")] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Every vLLM server: what it serves, and why not the newest."""
    with Operator(endpoint) as operator:
        found = operator.servers(fleet)
    if as_json:
        return _print_json({"servers": [*map(_plain, found)]})
    _print_table(
        ("server", "fleet", "state", "serves", "wants", "workers", "apply", "pause", "reason"),
        (
            (
                s.name, s.fleet, resources_pb2.Server.State.Name(s.state), _number(s.version), _number(s.wanted_version),
                f"{len(s.workers)}/{s.world_size}", f"{max((w.apply_seconds for w in s.workers), default=0):.3f} s",
                f"{s.install.pause_seconds:.3f} s", s.reason or s.install.error,
            )
            for s in found
        ),
    )  # fmt: skip


@app.command()
def export(
    version: Annotated[str, typer.Argument(help="A number, `latest`, or models/MODEL/versions/NUMBER.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty.")],
    model: ModelName = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a checkpoint that `from_pretrained` opens: whole, checked, or not at all."""
    with Operator(endpoint) as operator:
        wanted = operator.find_version(version, model)
        with _bar(as_json, f"version {wanted.number}", wanted.size_bytes) as progress:
            done = operator.export(wanted, folder, progress.update)
    if as_json:
        return _print_json({"version": wanted.name, "folder": str(folder), "files": done.files, "bytes": done.bytes})
    print(f"{wanted.name} (step {wanted.step}): {done.files} files, {_size(done.bytes)} in {folder}")


@app.command("fetch-config")
def fetch_config(
    arguments: Annotated[list[str], typer.Argument(metavar="[MODEL] DIR", help="MODEL is not needed where the daemon has one.")],
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write a model's config and tokenizer into a folder for `vllm serve`."""
    if len(arguments) > 2:
        raise UsageError(f"expected [MODEL] DIR, got {len(arguments)} arguments")
    *models, folder = arguments
    with Operator(endpoint) as operator:
        model = models[0] if models else operator.only_model()
        files = operator.fetch_config(model, Path(folder))
    if as_json:
        return _print_json({"model": model, "folder": folder, "files": files})
    print(f"{model}: {', '.join(files)} in {folder}")


@app.command()
def doctor(endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Look at this host, and at the daemon from it, and say what to mend. Exits 1 if something must be."""
    from resharder.client.doctor import examine

    checks = list(examine(endpoint))
    if as_json:
        _print_json({"checks": [check._asdict() for check in checks]})
    else:
        _print_table(("", "check", "found", "to mend"), ((c.verdict, c.name, c.found, c.mend) for c in checks))
    raise typer.Exit(1 if any(check.verdict == "fail" for check in checks) else 0)


@app.command()
def check(
    config: Annotated[Path, typer.Argument(help="A config.json, or a folder that has one.")],
    world: Annotated[int, typer.Option(help="Trainer ranks; 0: no trainer.")] = 0,
    tp: Annotated[int, typer.Option(help="The trainer's tensor parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.")] = 1,
    vpp: Annotated[int, typer.Option(help="Virtual pipeline stages of a rank; 0: none.")] = 0,
    cp: Annotated[int, typer.Option(help="Context parallel size.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel size.")] = 1,
    etp: Annotated[int, typer.Option(help="Expert tensor parallel size; 0: Megatron's default.")] = 0,
    spec: Annotated[str, typer.Option(help="Megatron's layers: local or te (needs TransformerEngine).")] = "local",
    vocab_multiple: Annotated[int, typer.Option(help="The vocabulary is padded to a multiple of this times tp.")] = 128,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=JSON", help="For TransformerConfig.")] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    server_tp: Annotated[int, typer.Option(help="The server's tensor parallel size; 0: no server.")] = 0,
    server_pp: Annotated[int, typer.Option(help="Its pipeline parallel size.")] = 1,
    server_dp: Annotated[int, typer.Option(help="Its data parallel size.")] = 1,
    server_ep: Annotated[bool, typer.Option("--server-ep", help="Experts are spread over its tp x dp workers.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say beforehand whether a trainer's layout and a server's fit a model, and what each process sends and receives.

    From the config alone: no weights, no GPU, any number of ranks. Exits 4 with the reason if something does not fit.
    """
    from resharder.client import check as checking

    warnings.filterwarnings("ignore", module="megatron")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report = checking.check(
        checking.read_config(config),
        checking.parallel(world, tp, pp, vpp, cp, ep, etp) if world else None,
        checking.server(server_tp, server_pp, server_dp, server_ep) if server_tp else None,
        dtype=dtype,
        options={"spec": spec, "vocab_multiple": vocab_multiple} | checking.settings(set_ or []),
        progress=_count if sys.stderr.isatty() and not as_json else lambda what, done, total: None,
    )
    if as_json:
        return _print_json(asdict(report))
    print(f"{report.architecture}: {report.tensors} tensors, {_size(report.size)}: every element has one place")
    sides = (("rank to daemon", report.sends), ("daemon to worker", report.receives), ("rank to workers", report.direct))
    _print_table(
        ("bytes", "processes", "each, mean", "largest", "largest / mean"),
        (
            (title, str(len(s.bytes_each)), _size(s.total // len(s.bytes_each)), _size(max(s.bytes_each)), f"{s.imbalance:.3f}")
            for title, s in sides
            if s is not None
        ),
    )
    if report.copies:
        print(f"the direct path: {report.copies} copies")
    if report.through_load_weights:
        names = ", ".join(report.through_load_weights[:4])
        print(f"{len(report.through_load_weights)} tensors go whole through load_weights: {names}")


@app.command()
def architectures(as_json: AsJson = False) -> None:
    """The model families that a Megatron trainer can attach, and what proves each."""
    from resharder.converters.architectures import ARCHITECTURES, NOT_BUILT

    if as_json:
        found = [{"model_type": a.model_type, "architecture": a.name, "proof": a.proof} for a in ARCHITECTURES]
        return _print_json({"architectures": found, "not_built": NOT_BUILT})
    _print_table(("model_type", "architecture", "proof"), ((a.model_type, a.name, a.proof) for a in ARCHITECTURES))
    for name, why in NOT_BUILT.items():
        print(f"not supported: {name}: {why}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and ends the process with one of the exit codes above."""
    try:
        app(arguments)
    except ResharderError as error:
        print(f"resharder: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 3 if isinstance(error, DaemonUnreachable) else 4)
    except ConversionError as error:
        print(f"resharder: {error}", file=sys.stderr)
        sys.exit(4)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        print(f"resharder: {error}", file=sys.stderr)
        sys.exit(2)


def _count(what: str, done: int, total: int) -> None:
    print(f"\r{what}: {done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


class _bar:
    """A progress bar on stderr; none for JSON."""

    def __init__(self, silent: bool, title: str, total: int) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress("{task.description}", *columns, console=Console(stderr=True), disable=silent)
        self._task = self._progress.add_task(title, total=total)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def __enter__(self) -> "_bar":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def _plain(message: Message) -> dict[str, Any]:
    """64-bit integers are strings in protobuf's JSON; scripts want numbers."""
    found: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return _numbers(message, found)


def _numbers(message: Message, found: dict[str, Any]) -> dict[str, Any]:
    for field in message.DESCRIPTOR.fields:
        value = found.get(field.name)
        if field.message_type is not None and field.message_type.full_name.startswith("resharder."):
            inner = getattr(message, field.name)
            if isinstance(value, list):
                for one, plain in zip(inner, value, strict=True):
                    _numbers(one, plain)
            elif isinstance(value, dict):
                _numbers(inner, value)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and value is not None:
            found[field.name] = [int(v) for v in value] if isinstance(value, list) else int(value)
    return found


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def _print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    rows = list(rows)
    if not rows:
        print(f"no {titles[0] or titles[1]}s")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Piped output is for programs: never cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 240, markup=False, highlight=False).print(table)


def _time(stamp: Any) -> str:
    return datetime.fromtimestamp(stamp.seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _arrived(version: resources_pb2.Version) -> str:
    received = sum(slot.received_bytes for slot in version.slots)
    return f"{100 * received // max(1, version.size_bytes)} %" if version.state == resources_pb2.Version.STAGING else "–"


def _number(version: int) -> str:
    return str(version) if version else "–"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 28 else f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    main()

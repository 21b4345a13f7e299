"""Commands on versions: copies, the archive, deletion. A version is a number, `latest`, or models/MODEL/versions/NUMBER."""

import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from resharder.client.cli import complete, format
from resharder.client.cli.app import AsJson, Endpoint, ModelName, Section, VersionName, command
from resharder.client.cli.format import several, time_of
from resharder.client.cli.terminal import Bar, Columns, print_json, print_line, print_stderr, print_table, shown, waiting
from resharder.client.errors import NotFound, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import ArchivedVersion, RetireVersionsResponse, Version
from resharder.client.operator.convert import plain
from resharder.client.settings import FLEET
from resharder.converters.checkpoint_files import folder_names, missing_files
from resharder.converters.units import size_text as size

_NAME = re.compile(r"models/(?P<model>[^/]+)/versions/(?P<number>\d+)")


@command(Section.VERSIONS)
def export(
    version: VersionName,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    model: ModelName = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as a checkpoint for `from_pretrained`, complete and verified, or not at all."""
    with Operator(endpoint) as operator:
        with waiting(f"connecting to {operator.endpoint}", as_json):
            wanted = named_version(operator, version, model)
        with Bar(as_json, f"version {wanted.number}", wanted.size_bytes) as progress:
            done = operator.export(wanted.number, folder, model=wanted.model, progress=progress.update)
    if as_json:
        return print_json({"version": wanted.name, "folder": str(folder), "files": done.files, "bytes": done.bytes})
    print_line(f"{wanted.name} (step {wanted.step}): {done.files} files, {size(done.bytes)} in {folder}")


@command(Section.VERSIONS, "import")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of safetensors, PEFT's too, or a torch_dist checkpoint of Megatron.")
    ],
    model: ModelName = "",
    base: Annotated[
        str | None, typer.Option("--base", metavar="NAME", help="The model that DIR's adapter is loaded beside.")
    ] = None,
    base_version: Annotated[
        int | None, typer.Option("--base-version", metavar="N", min=1, help="Version of the base that it was trained on.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", min=0, help="The version's label; by default the number in DIR's name."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="PATH", help="config.json or its folder; Megatron checkpoints need it.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="The tokenizer, if neither DIR nor --config has it.")
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Let `latest` select the version, which it skips by default.")] = False,
    take_over: Annotated[bool, typer.Option("--take-over", help="Also fence a live trainer, which then cannot publish.")] = False,
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Create a version from a checkpoint folder, without a trainer. Megatron's may have any parallel layout.

    Fleets with the target `latest` skip the version, unless --serve is given or the model has no other: `update N` serves it.

    \b
    resharder import checkpoints/step-100 --model policy --step 100
    resharder import runs/7/checkpoints --config Qwen3-8B
    resharder import runs/8/checkpoint-100 --model policy-lora --base policy
    """
    with waiting("importing torch", as_json):
        from resharder.client.tools.import_checkpoint import import_checkpoint, step_of

    warnings.filterwarnings("ignore", module="megatron")
    number = step_of(folder) if step is None else step
    if number is None:
        raise UsageError(f"the name of {folder} has no step, as step-100 has: pass --step N")
    with Operator(endpoint) as operator, waiting(f"connecting to {operator.endpoint}", as_json):
        if base is not None and not model:
            raise UsageError("pass --model NAME: the adapter's versions need a name of their own")
        model = model or _import_model(operator)
    if not as_json:
        purpose = "to be served" if serve else "skipped by `latest` unless it is the first"
        print_stderr(f"importing {folder} as a version of {model}, step {number}, {purpose}")
    with Bar(as_json, f"import into {model}", None) as progress, waiting("reading and checking the checkpoint", as_json) as begun:

        def update(done: int, total: int) -> None:
            begun()
            progress.update(done, total)

        done = import_checkpoint(
            endpoint, folder, model, base=base, base_version=base_version, step=number, config=config, tokenizer=tokenizer,
            take_over=take_over, serve=serve, progress=update,
        )  # fmt: skip
    if as_json:
        return print_json(plain(done))
    skipped = f"; `latest` skips it: `resharder update {done.number}` serves it" if done.skipped else ""
    print_line(f"{done.name} (step {done.step}): {size(done.size_bytes)} from {folder}{skipped}")


def _import_model(operator: Operator) -> str:
    """Return the daemon's only model. Raises UsageError."""
    models = operator.daemon().models
    if len(models) != 1:
        raise UsageError(f"pass --model NAME: the daemon has {', '.join(models) or 'no model'}")
    return models[0]


@command(Section.VERSIONS, "fetch-config")
def fetch_config(
    arguments: Annotated[list[str], typer.Argument(metavar="[MODEL] DIR", help="MODEL is not needed where the daemon has one.")],
    fleet: Annotated[
        str, typer.Option(envvar=FLEET.name, metavar="NAME", help="The server's fleet; by default the model's.")
    ] = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write the config and tokenizer of the version that a server boots now into a folder for `vllm serve`."""
    if len(arguments) > 2:
        raise UsageError(f"expected [MODEL] DIR, got {len(arguments)} arguments")
    *models, folder = arguments
    with Operator(endpoint) as operator:
        model = models[0] if models else operator.only_model()
        files = operator.fetch_config(Path(folder), model=model, fleet=fleet)
    adapter = folder_names("any").config in files  # whose tokenizer is the base's
    missing = "" if adapter else missing_files({name: (Path(folder) / name).read_bytes() for name in files})
    if as_json:
        return print_json({"model": model, "folder": folder, "files": files, "missing": missing})
    print_line(f"{model}: {', '.join(files)} in {folder}")
    if missing:
        print_stderr(f"resharder: {missing}")


@command(Section.VERSIONS)
def archive(version: VersionName, model: ModelName = "", endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """Write a version to the daemon's archive and verify it there."""
    with Operator(endpoint) as operator:
        wanted = named_version(operator, version, model)
        done = operator.archive(wanted.number, model=wanted.model)
    if as_json:
        return print_json(plain(done))
    print_line(f"{done.name}: {size(done.size_bytes)} at {done.url}")


@command(Section.VERSIONS)
def archived(model: ModelName = "", endpoint: Endpoint = None, as_json: AsJson = False) -> None:
    """List the archive."""
    with Operator(endpoint) as operator:
        found = operator.archived(model)
    if as_json:
        return print_json({"versions": [*map(plain, found)]})
    print_table(
        Columns(("archived version", "size", "archived", "url")),
        ((a.name, size(a.size_bytes), time_of(a.archive_time), a.url) for a in found),
    )


@command(Section.VERSIONS)
def restore(
    version: Annotated[
        str,
        typer.Argument(
            metavar="VERSION", help="A number, `latest`, or models/MODEL/versions/NUMBER.", autocompletion=complete.archived
        ),
    ],
    model: ModelName = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Restore a version from the archive, under its own number; on an empty host too."""
    with Operator(endpoint) as operator:
        wanted = archived_version(operator.archived(model), version)
        done = operator.restore(wanted.number, model=wanted.model)
    if as_json:
        return print_json(plain(done))
    print_table(*format.version_table([done]))


@command(Section.VERSIONS)
def gc(
    versions: Annotated[
        list[int] | None, typer.Argument(metavar="N…", help="Versions to drop.", autocompletion=complete.numbers)
    ] = None,
    keep: Annotated[int, typer.Option("--keep", metavar="N", min=0, help="Drop all but the N newest READY versions.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be dropped, and drop nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    model: ModelName = "",
    endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> None:
    """Delete unused versions after a confirmation, and list the users of the others."""
    if bool(versions) == bool(keep):
        raise UsageError("pass the numbers of versions to drop, or --keep N for all but the N newest")
    if as_json and not (dry_run or yes):
        raise UsageError("--json cannot ask for confirmation: pass --yes or --dry-run")
    with Operator(endpoint) as operator:
        model = model or operator.only_model()
        if not (dry_run or yes):
            foreseen = operator.gc(versions or (), keep=keep, dry_run=True, model=model)
            _print_retired(foreseen, "would be dropped")
            if not foreseen.retired or not _agreed(len(foreseen.retired), _last_resort(operator, model, foreseen)):
                return
            versions, keep = [version.number for version in foreseen.retired], 0
        done = operator.gc(versions or (), keep=keep, dry_run=dry_run, model=model)
    if as_json:
        retired, kept = [*map(plain, done.retired)], [*map(plain, done.kept)]
        return print_json({"retired": retired, "kept": kept, "freed_bytes": done.freed_bytes, "dry_run": dry_run})
    _print_retired(done, "would be dropped" if dry_run else "dropped")


def _print_retired(answer: RetireVersionsResponse, what: str) -> None:
    for version in answer.kept:
        print_line(f"{version.name} (step {version.step}) is kept: in use by {', '.join(version.used_by) or 'a fleet'}")
    for version in answer.retired:
        print_line(f"{version.name} (step {version.step}) {what}")
    print_line(f"{several(len(answer.retired), 'version')}, {size(answer.freed_bytes)} {what}")


def _last_resort(operator: Operator, model: str, foreseen: RetireVersionsResponse) -> str:
    """Return the warning about fleets that could not be rolled back afterwards; empty without one."""
    going = {version.number for version in foreseen.retired}
    ready = {version.number for version in operator.versions(model) if version.state == Version.State.READY}
    hurt = [
        fleet.name
        for fleet in operator.fleets()
        if fleet.model == model
        and fleet.settled_version
        and (earlier := {number for number in ready if number < fleet.settled_version})
        and earlier <= going
    ]
    return f"This leaves no version to roll {' and '.join(hurt)} back to. " if hurt else ""


def _agreed(count: int, warning: str) -> bool:
    """Return the operator's confirmation. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask for confirmation: pass --yes or --dry-run")
    return typer.confirm(shown(f"{warning}Drop {several(count, 'version')}?"))


def named_version(operator: Operator, text: str, model: str = "") -> Version:
    """Return a version by its name. Raises NotFound, UsageError."""
    if text == "latest":
        return operator.latest(model)
    if found := _NAME.fullmatch(text):
        return operator.version(int(found["number"]), model=found["model"])
    if not text.isdigit():
        raise _not_a_version(text)
    return operator.version(int(text), model=model)


def archived_version(archived: Sequence[ArchivedVersion], text: str) -> ArchivedVersion:
    """Return an archived version by its name. Raises NotFound, and UsageError if several models have it."""
    if not text.startswith("models/") and text != "latest" and not text.isdigit():
        raise _not_a_version(text)
    chosen = [one for one in archived if text in ("latest", one.name, str(one.number))]
    if not chosen:
        found = ", ".join(one.name for one in archived) or "none"
        raise NotFound(f"{text} is not archived; archived versions: {found}")
    if len({one.model for one in chosen}) > 1:
        names = ", ".join(one.name for one in chosen)
        raise UsageError(f"several models have this version archived ({names}): pass --model")
    return max(chosen, key=lambda one: one.number)


def _not_a_version(text: str) -> UsageError:
    return UsageError(f"expected a version's number, `latest` or models/MODEL/versions/NUMBER, got {text!r}")

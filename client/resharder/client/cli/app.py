"""The Typer application, and what its commands share: options, sections of the help, exit codes."""

from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Annotated, Any

import typer
from resharder.client.cli import complete
from resharder.client.settings import ENDPOINT
from typer.core import TyperGroup

EXIT_CODES = """\b
Exit codes:
  0    done
  1    `doctor` found a problem; `probe`: the server should get no requests; `verify` found other weights
  2    the command cannot run as it was given
  3    the daemon cannot be reached
  4    the daemon refuses, or does not have it; or trainer and server do not fit (`check`)
  5    the move ended FAILED or STOPPED, or servers failed or were lost on the way
  6    --timeout ended the wait
  130  ended by Ctrl-C (`watch` and `events --follow`: 0)
  141  the reader of the output has gone, as in `resharder events | head -1`

A fleet's name may be omitted if the daemon has one fleet. `resharder COMMAND --help` has details;
`resharder --install-completion` makes the shell complete commands, fleets, servers and versions.
"""
WENT_WRONG = 5


class Section(str, Enum):
    """Titles under which the help lists commands, in order."""

    LOOK = "Look"
    MOVE = "Move fleets"
    MAINTAIN = "Sleep, wake and maintenance"
    VERSIONS = "Versions"
    CHECK = "Check"


class Sections(TyperGroup):
    """Plain help, with the commands under the titles of their sections."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, section by section."""
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        for section in Section:
            rows = [(name, command) for name, command in commands if command.rich_help_panel == section]  # type: ignore[attr-defined]
            with formatter.section(section.value):
                formatter.write_dl([(name, command.get_short_help_str(90)) for name, command in rows])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"resharder {version('resharder')}")
        raise typer.Exit


app = typer.Typer(
    cls=Sections,
    no_args_is_help=True,
    help="Inspect and operate a Resharder daemon: versions, fleets and vLLM servers.",
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the release.")
    ] = False,
) -> None:
    """Take the options that precede a command."""


def command(section: Section, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return the decorator that adds a command to a section of the help; by default it has the function's name."""
    return app.command(name, rich_help_panel=section)


Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint", envvar=ENDPOINT.name, metavar="HOST:PORT", help="Address of the daemon; by default 127.0.0.1:7677."
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns and full names, as in a pipe.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
ModelName = Annotated[
    str,
    typer.Option("--model", metavar="NAME", help="Not needed if the daemon has one model.", autocompletion=complete.models),
]
FleetName = Annotated[
    str,
    typer.Option("--fleet", metavar="NAME", help="Not needed if the daemon has one fleet.", autocompletion=complete.fleets),
]
VersionName = Annotated[
    str,
    typer.Argument(
        metavar="VERSION", help="A number, `latest`, or models/MODEL/versions/NUMBER.", autocompletion=complete.versions
    ),
]
Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason for the journal (`events`).")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done; progress goes to standard error.")]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", min=0, help="Bound on --wait, which then exits 6. 0: no bound.")
]

"""Write the tables of options from their declarations; a test compares.

python -m tools.configuration_page

The daemon's and the node's options come from their models, the clients' variables from `client/settings.py`, and the refusals
from `converters/allowances.py`. Each table stands in its page behind a comment that names it. `deploy/resharderd.yaml` is written
whole.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from resharder.client import settings
from resharder.converters.allowances import REFUSALS
from resharder.converters.environment import Variable
from resharder.server.config import Config
from resharder.server.node.main import NodeConfig
from resharder.server.options import Option, options

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "deploy" / "resharderd.yaml"
_EXAMPLES = {
    "security": """\
security:
  certificate: /etc/resharder/tls/tls.crt
  key: /etc/resharder/tls/tls.key
  client_ca: /etc/resharder/tls/ca.crt
  tokens: /etc/resharder/tokens
  roles: {dns:trainer.rl.example: [publisher:policy], dns:*.serve.example: [server:policy], token:alice: [operator]}""",
    "checks": "checks: {probe: [/usr/local/bin/probe, --quick]}",
}


def tables() -> dict[str, dict[str, list[str]]]:
    """Return the rows of each table, by page and name."""
    return {
        "configuration.md": {
            "daemon options": _options(options(Config)),
            "client variables": _variables(settings.OF_ALL, default=False),
            "refusals": ["| name | accepts |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in REFUSALS.items())],
        },
        "reference/nodes.md": {"node options": _options(options(NodeConfig))},
        "reference/vllm.md": {"server variables": _variables(settings.OF_SERVERS, default=True)},
    }


def _options(found: Iterable[Option]) -> list[str]:
    rows = list(found)
    prefix = rows[0].variable.removesuffix(rows[0].name.upper())
    return [
        f"| flag | environment `{prefix}…` | default | meaning |",
        "|---|---|---|---|",
        *(
            f"| {f'`{row.flag}`' if row.flag else 'file only'} | `{row.name.upper()}` | {row.default} | {row.meaning} |"
            for row in rows
        ),
    ]


def _variables(found: Iterable[Variable[object]], default: bool) -> list[str]:
    if not default:
        return ["| variable | meaning |", "|---|---|", *(f"| `{each.name}` | {each.meaning} |" for each in found)]
    rows = (f"| `{each.name}` | {each.default or '–'} | {each.meaning} |" for each in found)
    return ["| variable | default | meaning |", "|---|---|---|", *rows]


def page(name: str) -> str:
    """Return a page of docs/ with its tables written again."""
    text = (ROOT / "docs" / name).read_text()
    for table, rows in tables()[name].items():
        mark = f"<!-- Table of {table}, made by `make docs-configuration`. -->"
        before, found, after = text.partition(mark)
        if not found:
            raise SystemExit(f"docs/{name} has no place for the table: write {mark} where it belongs")
        rest = re.sub(r"\A\n*(\|.*\n)*\n?", "", after)
        text = "\n".join([before + mark, "", *(_links(row, name) for row in rows), ""]) + (f"\n{rest}" if rest else "")
    return text


def _links(row: str, name: str) -> str:
    """Return a row for a page, with its links, which are those of docs/NAME.md, as they are from there."""
    guide = name.partition("/")[2]
    return re.sub(r"\]\((?!https?:)([^)#]*)", lambda link: f"](../{link[1] or guide}", row) if guide else row


def example() -> str:
    """Return the example of a configuration file: every option, with its default where no other value is named."""
    parts = [
        "# resharderd --config resharderd.yaml\n"
        "# Every option. Flags go before the environment (RESHARDERD_LISTEN, …), and both before this file.\n"
    ]
    for option, (name, field) in zip(options(Config), Config.model_fields.items(), strict=True):
        value = field.examples[0] if field.examples else field.get_default()
        text = re.sub(r"\[([^\]]*)\]\(([^)#]*)[^)]*\)", r"\1 (docs/\2)", option.meaning)
        lines = textwrap.wrap(text[0].upper() + text[1:] + ".", 126, break_long_words=False, break_on_hyphens=False)
        if name in _EXAMPLES:
            lines += [f"    {line}" for line in _EXAMPLES[name].splitlines()]
        parts.append("\n".join(f"# {line}" for line in lines) + "\n" + yaml.safe_dump({name: value}, default_flow_style=False))
    return "\n".join(parts)


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file that has generated parts, and its text."""
    yield EXAMPLE, example()
    for name in tables():
        yield ROOT / "docs" / name, page(name)


if __name__ == "__main__":
    for path, text in files():
        path.write_text(text)
        print(path)

"""Write the table of families and formats in docs/quantization.md; a test compares.

Run `python -m tools.formats_table`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import Scheme, check_family

from tests.support.tiny_hf import tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"
BEGIN, END = "<!-- Made by `python -m tools.formats_table`. -->", "<!-- End of the table. -->"


def page() -> str:
    """Return the page with the table as the code has it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"


def table() -> str:
    """Return a row for each family: FP8 in blocks, the modules that are cast, and the modules that stay unconverted."""
    rows = ["| family | FP8 in blocks | cast | unconverted |", "|---|---|---|---|"]
    rows += [_row(a.model_type, tiny_config(a.model_type.removesuffix("_text"))) for a in ARCHITECTURES]
    return "\n".join(rows) + "\n"


def _row(family: str, config: Mapping[str, Any]) -> str:
    shapes, scheme = expected_shapes(config), Scheme()
    try:
        check_family(config, shapes.items())
    except UnsupportedModel:
        return f"| `{family}` | refused: stacked experts | – | – |"
    cast = {_module(name) for name, shape in shapes.items() if scheme.converts(name, shape)}
    kept = {name.rpartition(".")[2] for name in scheme.unconverted(shapes)}
    return f"| `{family}` | yes | {_listed(cast)} | {_listed(kept)} |"


def _module(name: str) -> str:
    return name.split(".")[-2]


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(page())

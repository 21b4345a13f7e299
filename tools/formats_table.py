"""Write the table of families and the modules that a cast leaves in docs/quantization.md; a test compares.

Run `python -m tools.formats_table`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import Scheme, check_family

from tests.support.tiny_hf import family_of, tiny_config

PAGE = Path(__file__).parents[1] / "docs" / "quantization.md"
BEGIN = "<!-- Table of modules, made by `python -m tools.formats_table`. -->"
END = "<!-- End of the table. -->"


def page() -> str:
    """Return the page with the table as the code has it."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{modules()}{END}{rest.partition(END)[2]}"


def modules() -> str:
    """Return a row for families that agree in the modules that stay unconverted."""
    families: dict[str, list[str]] = {}
    for architecture in ARCHITECTURES:
        family = architecture.model_type
        families.setdefault(_modules_of(tiny_config(family_of(family))), []).append(f"`{family}`")
    rows = [f"| {', '.join(names)} | {text} |" for text, names in families.items()]
    return "\n".join(["| families | unconverted |", "|---|---|", *rows]) + "\n"


def _modules_of(config: Mapping[str, Any]) -> str:
    shapes, scheme = expected_shapes(config), Scheme()
    try:
        check_family(config, shapes.items())
    except UnsupportedModel:
        return "refused: a tower" if "vision_config" in config else "refused: stacked experts"
    return ", ".join(f"`{name}`" for name in sorted({name.rpartition(".")[2] for name in scheme.unconverted(shapes)}))


if __name__ == "__main__":
    PAGE.write_text(page())

"""Write the tables of families and formats in docs/quantization.md; a test compares.

Run `python -m tools.formats_table`. The tests that a family has in a format are read from the tests' sources: the families that a
constant or a function of a test names.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from resharder.converters.architectures import ARCHITECTURES
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import UnsupportedModel
from resharder.converters.quantization.scheme import Scheme, check_family

from tests.support.tiny_hf import FAMILIES, tiny_config

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "quantization.md"
END = "<!-- End of the table. -->"
_FAMILIES = [architecture.model_type for architecture in ARCHITECTURES]


class Proof(NamedTuple):
    """A test of families in a format.

    Attributes:
        letter: Its sign in the table.
        test: Its file.
        promise: Text for the legend.
        names: For each format, the file and the constant or function in it that names the families.
    """

    letter: str
    test: str
    promise: str
    names: dict[str, tuple[str, str]]


BF16, BLOCKS, CHANNELS, RELEASED, MX = (
    "BF16",
    "cast in blocks",
    "cast by channel",
    "published in FP8 blocks",
    "published in MXFP8, MXFP4",
)
FORMATS = (BF16, BLOCKS, CHANNELS, RELEASED, MX)
_ENGINE, _GPU = "tests/vllm/test_fp8.py", "tests/gpu/test_fp8.py"
_BY_CHANNEL = "test_weights_cast_by_channel_go_by_boxes_and_leave_what_a_fresh_engine_has"
_BY_CHANNEL_GPU = "test_fp8_by_channel_over_one_another_leaves_what_a_fresh_engine_has"
PROOFS = (
    Proof(
        "W",
        "tests/vllm/test_targets.py",
        "what each worker takes, against the model's own `load_weights`",
        {BF16: ("tests/support/tiny_hf.py", "_FAMILIES")},
    ),
    Proof(
        "I",
        "tests/vllm/test_install.py",
        "vLLM engines on CPUs: every tensor and log-probability is that of a new one",
        {BF16: ("tests/vllm/test_install.py", "")},
    ),
    Proof(
        "R",
        "tests/client/test_quantised.py",
        "Megatron ranks in several layouts deliver one cast of the whole",
        {BLOCKS: ("tests/client/test_quantised.py", "CASES")},
    ),
    Proof(
        "T",
        "tests/client/test_primary_fp8.py",
        "ranks whose weights are FP8 already, in blocks that agree and that do not",
        {
            BLOCKS: (
                "tests/client/test_primary_fp8.py",
                "test_fp8_weights_are_handed_over_as_they_are_or_cast_from_the_master_weights_where_blocks_differ",
            ),
            CHANNELS: ("tests/client/test_primary_fp8.py", "test_by_channel_all_fp8_weights_are_cast_from_the_master_weights"),
        },
    ),
    Proof(
        "L",
        "tests/vllm/test_fp8_layouts.py",
        "weights and scales that each worker takes, by recording",
        {RELEASED: ("tests/support/fp8_checkpoint.py", "SHAPES")},
    ),
    Proof(
        "E",
        _ENGINE,
        "vLLM engines on CPUs with reference kernels: every tensor and log-probability is that of a new one",
        {RELEASED: (_ENGINE, "FAMILIES"), BLOCKS: (_ENGINE, "running"), CHANNELS: (_ENGINE, _BY_CHANNEL)},
    ),
    Proof(
        "D",
        "tests/e2e/test_fp8.py",
        "from ranks to servers over both paths, with sleep and ways back",
        {BLOCKS: ("tests/e2e/test_fp8.py", "CONFIG")},
    ),
    Proof(
        "M",
        "tests/vllm/test_mx.py",
        "vLLM engines on CPUs with its emulation or reference kernels: every tensor and log-probability is that of a new one",
        {MX: ("tests/support/mx_checkpoint.py", "")},
    ),
    Proof(
        "G",
        _GPU,
        "vLLM engines on a GPU, which CI does not have: [what has run](reference/vllm.md#quantised-models)",
        {RELEASED: (_GPU, "FAMILIES"), CHANNELS: (_GPU, _BY_CHANNEL_GPU)},
    ),
)


def page() -> str:
    """Return the page with the tables as the code and the tests have them."""
    text = PAGE.read_text()
    for name, table in (("modules", modules()), ("tests", tests())):
        begin = f"<!-- Table of {name}, made by `python -m tools.formats_table`. -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}{END}{rest.partition(END)[2]}"
    return text


def modules() -> str:
    """Return a row for families that agree in the modules that are cast, and in those that stay unconverted."""
    rows = ["| families | cast | unconverted |", "|---|---|---|"]
    rows += _grouped({family: _modules_of(_config(family)) for family in _FAMILIES})
    return "\n".join(rows) + "\n"


def _grouped(cells: Mapping[str, str]) -> list[str]:
    """Return a row for each text of cells, with the families that have it."""
    families: dict[str, list[str]] = {}
    for family, text in cells.items():
        families.setdefault(text, []).append(f"`{family}`")
    return [f"| {', '.join(names)} | {text} |" for text, names in families.items()]


def _config(family: str) -> dict[str, Any]:
    return tiny_config(family.removesuffix("_text"))


def _modules_of(config: Mapping[str, Any]) -> str:
    if not _is_cast(config):
        return "refused: stacked experts | –"
    shapes, scheme = expected_shapes(config), Scheme()
    cast = {_module(name) for name, shape in shapes.items() if scheme.converts(name, shape)}
    kept = {name.rpartition(".")[2] for name in scheme.unconverted(shapes)}
    return f"{_listed(cast)} | {_listed(kept)}"


def tests() -> str:
    """Return a row for families with the same tests in each format, and a line for each test."""
    rows = [f"| families | {' | '.join(FORMATS)} |", "|---" * (len(FORMATS) + 1) + "|"]
    rows += _grouped({family: _tests_of(family) for family in _FAMILIES})
    return "\n".join(rows) + "\n\n" + "\n".join(f"- {p.letter}: {p.promise} (`{p.test}`)" for p in PROOFS) + "\n"


def _tests_of(family: str) -> str:
    cast = _is_cast(_config(family))
    return " | ".join(
        _letters(family, kind) or ("refused" if kind in (BLOCKS, CHANNELS) and not cast else "–") for kind in FORMATS
    )


def _letters(family: str, kind: str) -> str:
    return " ".join(proof.letter for proof in PROOFS if kind in proof.names and family in _named(*proof.names[kind]))


@cache
def _named(file: str, name: str) -> frozenset[str]:
    """Return the families that a constant or a function at the top of a file names; that the whole file does, without a name."""
    tree: ast.AST = ast.parse((ROOT / file).read_text())
    if name:
        tree = next(node for node in ast.iter_child_nodes(tree) if name in _names_of(node))
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return frozenset(str(tiny_config(family)["model_type"]) for family in strings.intersection(FAMILIES))


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _is_cast(config: Mapping[str, Any]) -> bool:
    try:
        check_family(config, expected_shapes(config).items())
    except UnsupportedModel:
        return False
    return True


def _module(name: str) -> str:
    return name.split(".")[-2]


def _listed(names: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(page())

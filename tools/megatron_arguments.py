"""The arguments of megatron-core's configs and GPTModel, by release, for tests that run without those releases.

    python -m tools.megatron_arguments FOLDER...

FOLDER is an unpacked wheel, of which the sources are read and nothing is run. Its release is added to the data, or replaced.
"""

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parents[1] / "tests" / "converters" / "megatron_arguments.json"


def main(folders: list[str]) -> None:
    """Read the wheels unpacked in `folders` into the data."""
    found = json.loads(DATA.read_text()) if DATA.exists() else {}
    for folder in map(Path, folders):
        core = folder / "megatron" / "core"
        (wheel,) = folder.glob("megatron_core-*.dist-info")
        configs, parallel = core / "transformer" / "transformer_config.py", core / "model_parallel_config.py"
        own = {*fields(configs, "TransformerConfig"), *fields(configs, "MLATransformerConfig")}
        own |= set(parameters(core / "models" / "gpt" / "gpt_model.py", "GPTModel"))
        inherited = set(fields(parallel, "ModelParallelConfig"))
        release = wheel.name.removeprefix("megatron_core-").removesuffix(".dist-info")
        found[release] = {"models": sorted(own - inherited), "parallelism": sorted(inherited)}
    DATA.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def fields(path: Path, name: str) -> Iterator[str]:
    """Yield the fields of a dataclass, those that it inherits left out."""
    for line in class_in(path, name).body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            yield line.target.id


def parameters(path: Path, name: str) -> Iterator[str]:
    """Yield the parameters of a class's constructor, `self` and `config` left out."""
    for line in class_in(path, name).body:
        if isinstance(line, ast.FunctionDef) and line.name == "__init__":
            yield from (each.arg for each in (*line.args.args, *line.args.kwonlyargs) if each.arg not in ("self", "config"))


def class_in(path: Path, name: str) -> ast.ClassDef:
    """Return the class `name` of a source file."""
    return next(each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ClassDef) and each.name == name)


if __name__ == "__main__":
    main(sys.argv[1:])

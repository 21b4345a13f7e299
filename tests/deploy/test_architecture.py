"""The pages about the tree name files that exist, and the sources keep a few rules of structure."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:client|server|converters)/[\w/.]+)`")
SOURCES = [path for side in ("client", "server", "converters") for path in (ROOT / side).rglob("*.py")]
TESTS = [path for path in (ROOT / "tests").rglob("*.py") if "fake_te" not in path.parts]


@pytest.mark.parametrize("page", ["one-tensor.md", "architecture.md"])
def test_every_path_that_a_page_names_exists(page: str) -> None:
    named = NAMED.findall((ROOT / "docs" / page).read_text())
    assert len(named) > 10
    folders = {path: (ROOT / path.partition("/")[0] / "resharder", ROOT / "tests", ROOT) for path in named}
    assert [path for path in named if not any((folder / path).exists() for folder in folders[path])] == []


def walked(text: str) -> list[str]:
    """Return the modules that the numbered steps of a text name, in their order."""
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |^#|\Z)", text, re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(name for step in steps for name in NAMED.findall(step) if name.endswith(".py")))


def not_imported(walk: list[str]) -> list[str]:
    """Return the modules of a walk that no other one imports."""
    sources = {name: (ROOT / name.partition("/")[0] / "resharder" / name).read_text() for name in walk}

    def imported(name: str) -> bool:
        module = "resharder." + name.removesuffix(".py").replace("/", ".")
        package, _, last = module.rpartition(".")
        found = re.compile(rf"{re.escape(module)} import|from {re.escape(package)} import [^\n]*\b{last}\b")
        return any(found.search(source) for other, source in sources.items() if other != name)

    return [name for name in walk if not imported(name)]


def test_a_shard_passes_few_modules_of_trainer_and_plugin() -> None:
    way, _, rest = (ROOT / "docs" / "one-tensor.md").read_text().partition("## The way of one command")
    assert rest
    assert 30 < len([name for name in walked(way) if not name.startswith("server/")]) <= 39


def test_a_command_passes_few_modules_and_each_is_imported_by_another_or_an_entry() -> None:
    walk = walked((ROOT / "docs" / "one-tensor.md").read_text().partition("## The way of one command")[2].partition("\n## ")[0])
    services = {f"server/rpc/{name}.py" for name in ("dispatch", "operator_service", "server_service")}
    entries = {"client/cli/fleets.py", "client/operator/operator.py", *services}  # entered by gRPC, or as its folder's `Operator`
    assert 10 < len(walk) <= 14
    assert [name for name in not_imported(walk) if name not in entries] == []


def test_every_folder_says_what_it_is_for() -> None:
    packages = {path.parent for path in SOURCES} - {ROOT / side / "resharder" / side for side in ("server", "converters")}
    without = [folder for folder in packages if not (folder / "__init__.py").read_text().startswith('"""')]
    assert without == []


def test_no_test_module_imports_another() -> None:
    imports = re.compile(r"^from tests(?!\.support)[.\w]*\.test_|^from tests(?!\.support)[.\w]+ import test_", re.MULTILINE)
    assert [str(path.relative_to(ROOT)) for path in TESTS if imports.search(path.read_text())] == []


def names_of(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""


def test_the_daemon_reads_no_clock_but_the_given_one() -> None:
    """Outside of default arguments, nothing reads the time by itself, so a test can set the clock of any object."""
    reads = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "server").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and names_of(node.func) in ("time.time", "time.monotonic", "datetime.now", "datetime.utcnow")
    ]
    assert reads == []


def test_no_call_of_an_object_is_assigned_after_it_was_made() -> None:
    """Constructors take the callables of an object; a `Signal` connects one that is made later."""
    trees = {path: list(ast.walk(ast.parse(path.read_text()))) for path in SOURCES}
    annotated = [node for nodes in trees.values() for node in nodes if isinstance(node, ast.AnnAssign)]
    calls = {names_of(node.target).removeprefix("self.") for node in annotated if "Callable" in ast.unparse(node.annotation)}
    assigned = [
        f"{path.relative_to(ROOT)} {names_of(target)}"
        for path, nodes in trees.items()
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Attribute) and names_of(target.value) not in ("self", "cls") and target.attr in calls
    ]
    assert len(calls) > 10
    assert assigned == ["client/resharder/client/inference/worker/profile.py profile.table"]  # text of a message


def test_no_shared_code_asks_which_engine_it_runs_in() -> None:
    """Shared code asks for the traits that an engine declares. Two files look up the package: vLLM has two names on PyPI."""
    engines = {"vllm", "sglang"}

    def asks(path: Path) -> bool:
        compared = [
            [node.left, *node.comparators] if isinstance(node, ast.Compare) else [node.value]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Compare, ast.MatchValue))
        ]
        constants = [each for parts in compared for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant)]
        return any(isinstance(each.value, str) and each.value.lower() in engines for each in constants)

    shared = [path for path in SOURCES if not {"vllm", "sglang"} & {parent.name for parent in path.parents}]
    assert {path.name for path in shared if asks(path)} == {"doctor.py", "extras.py"}

"""The package `resharder.client`: what it exports, what it imports, and that documents need nothing else."""

import ast
import json
import re
import subprocess
import sys
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
import resharder.client
from resharder.client import deprecated, errors
from resharder.client.operator.answers import Node, Version
from resharder.converters import errors as conversion_errors

ROOT = Path(__file__).parents[2]
FRAGMENTS = ("adding-a-family.md",)  # lines of the sources themselves, for those who change them
DOCUMENTS = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in FRAGMENTS)]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list[tuple[str, str]]:
    return [(path.name, block) for path in DOCUMENTS for block in BLOCK.findall(path.read_text())]


def imports(code: str) -> list[tuple[str, str]]:
    """(module, name) of everything that a block imports from Resharder."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(dedent(code))):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.split(".")[0] == "resharder"]


def test_documents_import_from_the_client_package_alone_and_find_what_they_import() -> None:
    seen = [(document, module, name) for document, block in blocks() for module, name in imports(block)]
    assert {name for _, _, name in seen} >= {"connect", "fill", "Operator", "attach", "went_well"}
    assert [use for use in seen if use[1] != "resharder.client"] == []
    for _, module, name in seen:
        if name not in ("attach", "ResharderTrainerInitInfo", "ShardSource") or find_spec("vllm"):
            assert hasattr(import_module(module), name), f"{module} has no {name}"


def test_documents_name_integrations_that_exist() -> None:
    named = re.compile(r"resharder\.client\.integrations\.(\w+)(?:\.(\w+))?")
    found = {use for path in DOCUMENTS for use in named.findall(path.read_text())}
    assert found >= {("verl", ""), ("vime", "install")}
    for module, name in found:
        source = ast.parse((ROOT / "client" / "resharder" / "client" / "integrations" / f"{module}.py").read_text())
        assert name in {"", *(node.name for node in source.body if isinstance(node, ast.FunctionDef | ast.ClassDef))}


def test_every_exported_name_resolves_and_others_are_attribute_errors() -> None:
    pytest.importorskip("vllm", reason="`attach` and vLLM's backend need it")
    for name in resharder.client.__all__:
        assert getattr(resharder.client, name) is not None
    assert set(resharder.client.__all__) <= set(dir(resharder.client))
    with pytest.raises(AttributeError, match="nothing"):
        _ = resharder.client.nothing


@pytest.mark.parametrize("name", deprecated.RENAMED)
def test_a_renamed_name_is_the_new_one_and_warns(name: str) -> None:
    new = reduce(getattr, deprecated.RENAMED[name].split("."), resharder.client)
    with pytest.warns(
        DeprecationWarning, match=rf"resharder\.client\.{name} is now resharder\.client\.{deprecated.RENAMED[name]}$"
    ) as found:
        assert getattr(resharder.client, name) is new
    assert [warning.filename for warning in found] == [__file__]
    assert name not in resharder.client.__all__


@pytest.mark.parametrize(
    ("answer", "old", "new"),
    [
        (Version(skipped=True), "set_aside", "skipped"),
        (Node(received_daemon_bytes=5), "received_origin_bytes", "received_daemon_bytes"),
    ],
)
def test_a_renamed_field_is_the_new_one_and_warns(answer: object, old: str, new: str) -> None:
    kind = type(answer).__name__
    with pytest.warns(DeprecationWarning, match=rf"{kind}\.{old} is now {kind}\.{new}$") as found:
        assert getattr(answer, old) == getattr(answer, new)
    assert [warning.filename for warning in found] == [__file__]


def test_connect_takes_the_earlier_name_of_skipped_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"connect\(set_aside=…\) is now connect\(skipped=…\)$") as found:
        publisher = resharder.client.connect("127.0.0.1:1", model="policy", job="j", rank=0, world_size=1, set_aside=True)
    assert publisher.identity.skipped
    assert [warning.filename for warning in found] == [__file__]
    publisher.close()


def test_the_version_is_that_of_the_distribution() -> None:
    assert resharder.client.__version__ == version("resharder")


def test_importing_the_package_or_an_error_loads_no_more_than_it_needs() -> None:
    heavy = ("torch", "vllm", "megatron", "numba", "transformers", "google.protobuf", "typer")

    def loaded(code: str) -> list[str]:
        check = f"{code}; import json, sys; print(json.dumps([m for m in {(*heavy, 'grpc')!r} if m in sys.modules]))"
        found: list[str] = json.loads(subprocess.run([sys.executable, "-c", check], capture_output=True, check=True).stdout)
        return found

    assert loaded("import resharder.client") == []
    assert set(loaded("from resharder.client import Operator, VersionTarget, went_well")) == {"grpc", "google.protobuf"}
    for helper in ("claim", "fetch"):  # a worker waits for them, for `fetch` in each install
        assert not {"torch", "vllm"} & {*loaded(f"import resharder.client.inference.worker.{helper}")}


def test_all_errors_are_one_tree_and_the_head_of_its_file_draws_it() -> None:
    named = {name: getattr(errors, name) for name in errors.__all__}
    assert all(issubclass(error, resharder.client.ResharderError) for error in named.values())
    assert issubclass(resharder.client.ConversionError, ValueError)
    defined = {
        name
        for module in (errors, conversion_errors)
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined == set(named)
    depths: dict[int, str] = {-1: "Exception"}
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^((?:[│ ]   )*(?:[├└]── )?)([A-Z][A-Za-z]+)(?:\s{2,}|$)", line):
            depth = len(found[1]) // 4
            depths[depth] = found[2]
            assert depths[depth - 1] in {base.__name__ for base in named.pop(found[2]).__bases__}
    assert named == {}, "the head of errors.py leaves these out"


def test_a_conversion_error_has_its_reason() -> None:
    assert resharder.client.LayoutError("a hole").reason == "LAYOUT_MISMATCH"
    assert str(resharder.client.UnknownTensor("lm_head")) == "lm_head"


def test_typed_packages_carry_their_marker() -> None:
    for package in ("resharder.client", "resharder.converters", "resharder.server"):
        (folder,) = import_module(package).__path__
        assert (Path(folder) / "py.typed").is_file(), package


def test_the_api_page_has_every_exported_name() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: (\S+)", page, re.MULTILINE)
    documented = {name.rpartition(".")[2] for name in shown}
    for module in ("resharder.client.operator.answers", "resharder.client.errors"):
        assert module in shown
        documented |= vars(import_module(module)).keys()
    assert set(resharder.client.__all__) - documented == {"__version__"}

"""vLLM's own weight version and its own checksums, beside the version that Resharder reports, in a real worker."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from resharder.client.inference.version_page import page
from resharder.client.inference.vllm import outputs
from vllm.v1.engine.core import EngineCore

from tests.support.daemon import Daemon
from tests.support.vllm_engine import Engine
from tests.support.vllm_models import make_pair, publish, without_weights

pytestmark = pytest.mark.compat("labels")
PROMPT = [5, 6, 7, 8, 9, 10]


STAMPS = hasattr(EngineCore, "_attach_weight_version")
CHECKSUMS = hasattr(EngineCore, "compute_weight_checksums")


@pytest.fixture(scope="module")
def engine(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Booted on version 1 of two."""
    folder = tmp_path_factory.mktemp("native")
    first, second = make_pair(folder, "qwen3", torch.float32)
    publish(daemon, folder.name, first)
    environment = {"RESHARDER_ENDPOINT": daemon.endpoint, "RESHARDER_MODEL": folder.name}
    config = without_weights(first, folder / "config-only")
    with Engine(config, raw=True, environment=environment, load_format="resharder", dtype="float32") as running:
        publish(daemon, folder.name, second)
        running.versions = [f"models/{folder.name}/versions/{number}" for number in (1, 2)]
        yield running


def spans(engine: Engine, version: str, tokens: int = 4) -> bool:
    """Whether all tokens of an answer are stamped with a version; older releases of vLLM stamp none."""
    return not STAMPS or engine.weight_versions(PROMPT, tokens) == [(version, 0, tokens)]


def checksums(engine: Engine) -> dict[str, str]:
    """vLLM's own, or the fingerprints of a release that has none."""
    if not CHECKSUMS:
        found = engine.one("resharder_fingerprint")["tensors"]
        return {path: value for path, value in found.items() if path.endswith("weight")}
    return {name: value for worker in engine.core("compute_weight_checksums") for name, value in worker.items()}


def test_boot_install_and_rollback_set_vllms_version_and_give_its_checksums_of_before(engine: Any) -> None:
    assert engine.core("get_weight_version") == "1"
    assert spans(engine, "1")
    first = checksums(engine)
    assert engine.install(engine.versions[1], "forth")["ok"]
    assert engine.core("get_weight_version") == "2"
    assert spans(engine, "2")
    second = checksums(engine)
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first), "the versions differ in every tensor"
    assert engine.install(engine.versions[0], "back")["ok"]
    assert engine.core("get_weight_version") == "1"
    assert checksums(engine) == first
    assert engine.install(engine.versions[1], "forth again")["ok"]
    assert checksums(engine) == second


def test_dropped_weights_have_no_version_until_the_next_install(engine: Any) -> None:
    assert engine.install(engine.versions[1], "before sleep")["ok"]
    before = checksums(engine)
    engine.sleep(1)
    assert engine.core("get_weight_version") == "2", "sleep at level 1 keeps the weights"
    engine.wake("weights", "kv_cache")
    engine.sleep(2)
    assert engine.core("get_weight_version") == "none"
    engine.wake("weights", "kv_cache")
    assert engine.core("get_weight_version") == "none"
    assert engine.install(engine.versions[1], "after sleep")["ok"]
    assert engine.core("get_weight_version") == "2"
    assert checksums(engine) == before


def test_a_version_set_by_another_caller_does_not_replace_the_installed_one(engine: Any) -> None:
    installed = engine.core("get_weight_version")
    engine.core("set_weight_version", "mine")
    assert engine.core("get_weight_version") == installed
    assert spans(engine, installed)


class FakeCore:
    """The part of vLLM's engine core that has the weight version."""

    def __init__(self) -> None:
        self._weight_version = "default"

    def set_weight_version(self, weight_version: str) -> None:
        self._weight_version = weight_version

    def get_weight_version(self) -> str:
        return self._weight_version

    def _attach_weight_version(self, outputs: dict[int, Any]) -> None:
        for output in outputs.values():
            output.weight_version = self._weight_version


def test_outputs_carry_the_version_that_all_workers_have(own_page: None) -> None:
    kind = type("Core", (FakeCore,), {})
    outputs.follow_page(kind)
    outputs.follow_page(kind)
    core, output = kind(), SimpleNamespace()
    for rank, version, expected in ((0, 3, "3"), (1, 2, "none"), (1, 3, "3"), (0, 0, "none")):
        page().write(rank, version)
        core._attach_weight_version({0: output})
        assert (output.weight_version, core.get_weight_version()) == (expected, expected)


def test_an_unreadable_page_gives_no_version_and_does_not_end_the_engine(own_page: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type("Core", (FakeCore,), {})
    outputs.follow_page(kind)

    def fails() -> Any:
        raise OSError(24, "Too many open files")

    warned: list[str] = []
    monkeypatch.setattr(outputs.logger, "warning", lambda text, *values: warned.append(text % values))
    monkeypatch.setattr(outputs, "page", fails)
    core, output = kind(), SimpleNamespace()
    for _ in range(2):
        core._attach_weight_version({0: output})
    assert output.weight_version == "none"
    assert warned == ["cannot read the server's versions: [Errno 24] Too many open files"]


def test_a_vllm_that_stamps_no_tokens_answers_with_the_installed_version(own_page: None) -> None:
    """`/weight_info` of vLLM 0.28."""
    methods = {name: method for name, method in vars(FakeCore).items() if name != "_attach_weight_version"}
    kind = type("Core", (), methods)
    outputs.follow_page(kind)
    outputs.follow_page(kind)
    core = kind()
    page().write(0, 3)
    assert core.get_weight_version() == "3"


def test_a_vllm_without_a_weight_version_is_left_alone(own_page: None) -> None:
    kind = type("Core", (), {})
    outputs.follow_page(kind)
    assert not {name for name in vars(kind) if "version" in name}

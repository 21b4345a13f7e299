"""Weights that two Megatron ranks cast to FP8 blocks, in SGLang servers: every tensor and every answer is that of a fresh server.

Kernels are those of `raw_mode/resharder_reference_fp8.py`; loading and post-processing are SGLang's, as on an H200.
The tests share the server and run in order; each leaves it serving.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from resharder.client.inference.engine import InstallError
from resharder.client.inference.sglang.host import SGLangHost, post_process
from resharder.client.operator import Operator
from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

from demo.trainer_job import TrainerJob
from tests.support.daemon import Daemon
from tests.support.direct_server import start_trainer
from tests.support.engine_kinds import SGLANG
from tests.support.engine_site import contents, write_config
from tests.support.fp8_checkpoint import fp8_config
from tests.support.observing import export, servers, wait_serving, wait_until
from tests.support.sglang_server import STAND_INS, SGLangServer
from tests.support.tensor_hashes import PLUGINS, Held, differing, hashes, new_socket

State = tuple[Held, list[Any]]


def fp8_server(folder: Path, tp: int, *arguments: str, **environment: str | None) -> SGLangServer:
    plugins = ",".join(["reference_fp8", "tensor_hashes", *(["resharder"] if "RESHARDER_ENDPOINT" in environment else [])])
    paths = {"PYTHONPATH": f"{STAND_INS}:{PLUGINS}", "TENSOR_HASHES": new_socket()}
    found: dict[str, str | None] = {"RESHARDER_ENDPOINT": None, **paths, "SGLANG_PLUGINS": plugins, **environment}
    return SGLangServer(folder, list(arguments), found, dtype="bfloat16", tp=tp)


def state(server: SGLangServer) -> State:
    """Hashes of every tensor of each rank, and answers."""
    return hashes(str(server.env["TENSOR_HASHES"]), server.tp), contents(SGLANG, server)


@dataclass
class System:
    daemon: Daemon
    folder: Path
    trainer: TrainerJob
    server: SGLangServer
    steps: int = 0

    def publish(self, seed: int) -> int:
        """A version whose weights follow from a seed, served; its number."""
        self.steps += 1
        if self.steps > 1:
            self.trainer.ask(do="reseed", step=self.steps, seed=seed)
        version = int(self.trainer.ask(do="publish", step=self.steps)["version"])
        if self.steps > 1:
            wait_serving(self.daemon, version)
        return version


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def system(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    config = fp8_config(request.param)
    experts = "num_local_experts" in config
    folder = tmp_path_factory.mktemp(request.param)
    write_config(folder, config)
    trainer: dict[str, Any] = {
        "config": {key: value for key, value in config.items() if key != "quantization_config"},
        "tp": 2,
        "dtype": "bfloat16",
        "connect": {"direct_wait": 60.0, "quantization_config": config["quantization_config"]},
    } | ({"ep": 2} if experts else {})
    with Daemon(direct_seconds=60.0, data_listen="127.0.0.1:0") as daemon:
        server = fp8_server(folder, 2 if experts else 1, RESHARDER_ENDPOINT=daemon.endpoint, RESHARDER_SERVER_ID="one")
        built = System(daemon, folder, start_trainer(daemon, folder, trainer, 0), server)
        try:
            server.start()
            built.publish(1)
            server.wait_ready()
            with Operator(daemon.endpoint) as operator:
                operator.set_fleet("policy", serve_ahead=False)
            yield built
        finally:
            built.trainer.kill()
            server.stop()


def test_casts_and_their_scales_go_straight_into_memory_by_both_paths_and_back(system: System) -> None:
    """Version 1 comes from the store, 2 from the ranks' memory, 3 from the store; then a way back to 2."""
    wait_serving(system.daemon, 1)
    first = state(system.server)
    assert any("weight_scale_inv" in name for name in first[0][0])
    system.publish(2)
    (about,) = servers(system.daemon)
    assert {worker.path for worker in about.workers} == {"gloo"}
    second = state(system.server)
    assert all(differing([one], [other]) for one, other in zip(first[0], second[0], strict=True))
    assert first[1] != second[1]
    system.trainer.ask(do="withhold")
    system.publish(1)
    (about,) = servers(system.daemon)
    assert [(worker.path, worker.transport) for worker in about.workers] == [("", "shared-memory")] * len(about.workers)
    assert all(worker.boxed_bytes == worker.needed_bytes > 0 for worker in about.workers)
    assert differing(state(system.server)[0], first[0]) == []
    assert state(system.server)[1] == first[1]
    with Operator(system.daemon.endpoint) as operator:
        operator.rollback("policy", 2, reason="of its answers")
        wait_serving(system.daemon, 2)
        assert differing(state(system.server)[0], second[0]) == []
        assert state(system.server)[1] == second[1]
        for verification in operator.verify("one", timeout=60):
            assert (verification.different_tensors, verification.skipped) == (0, "")
            assert verification.covered_bytes == verification.total_bytes > 0
        operator.update("policy", accept_refused=True)
    wait_serving(system.daemon, 3)


def test_it_holds_and_answers_what_fresh_servers_do_and_so_does_one_that_began_with_random_weights(
    system: System, tmp_path: Path
) -> None:
    version = system.publish(4)
    held, answered = state(system.server)
    system.server.stop()
    export(system.daemon, f"models/policy/versions/{version}", tmp_path / "exported")
    with fp8_server(tmp_path / "exported", system.server.tp) as fresh:
        found = state(fresh)
        assert differing(held, found[0]) == []
        assert answered == found[1]
    daemon = system.daemon.endpoint
    if system.server.tp > 1:
        return  # one kind tells
    random = fp8_server(
        system.folder, system.server.tp, "--load-format", "dummy", RESHARDER_ENDPOINT=daemon, RESHARDER_SERVER_ID="two"
    )
    with random:
        wait_until(lambda: ("servers/two", version) in [(s.name, s.version) for s in servers(system.daemon)], "it serves", 60)
        found = state(random)
        assert differing(held, found[0]) == []
        assert answered == found[1]


class Attention(torch.nn.Module):
    """An attention layer of an FP8 model, with the scales of its KV cache as SGLang makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.quant_method = BaseKVCacheMethod(None)  # type: ignore[assignment]
        self.attn.quant_method.create_weights(self.attn)


def scales(model: Attention) -> list[float]:
    found = [model.attn.k_scale, model.attn.v_scale, model.attn.k_scale_float, model.attn.v_scale_float]
    return [float(one) for one in found]


HOST = SGLangHost(None, torch.device("cpu"), 0, 1, None)  # type: ignore[arg-type]


def test_a_reload_sets_the_scales_of_kv_caches_as_a_fresh_server_does() -> None:
    """Random weights are scales too, and a load over them brings none."""
    model = Attention()
    for scale in model.attn.parameters():
        scale.data.fill_(0.5)
    with torch.no_grad(), HOST.reloading(model, None, frozenset()):  # type: ignore[arg-type]
        pass
    assert float(model.attn.k_scale) == 0.5
    with torch.no_grad(), HOST.reloading(model, None, frozenset(["attn"])):  # type: ignore[arg-type]
        pass
    assert scales(model) == [1.0] * 4


def test_a_version_need_not_have_scales_of_kv_caches_and_is_refused_with_them() -> None:
    model = Attention()
    assert set(HOST.defaults(model.attn)) == {"k_scale", "v_scale"}
    assert not HOST.defaults(torch.nn.Linear(2, 2))
    with pytest.raises(InstallError, match="scales of a KV cache, which are not supported with SGLang"):
        HOST.original_loader(model.attn.k_scale)(model.attn.k_scale, torch.tensor(0.25))


class Casting:
    """A method whose kernel wants scales in UE8M0. These are so already, so that the cast changes no byte."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.weight_scale_inv.format_ue8m0 = True  # type: ignore[union-attr]


def test_scales_that_a_kernel_takes_in_another_format_end_a_load_and_a_reload_even_if_they_are_equal() -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.weight_scale_inv = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.layer.quant_method = Casting()  # type: ignore[assignment]
    with pytest.raises(InstallError, match=r"UE8M0 for its kernels\. SGLang cannot load them again: start it with"):
        post_process(model, HOST.device)
    with pytest.raises(InstallError, match="UE8M0"), HOST.reloading(model, None, frozenset(["layer"])):  # type: ignore[arg-type]
        pass

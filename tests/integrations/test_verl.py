"""The protocol of verl's own checkpoint engine tests with backend `resharder`: two trainers, six rollout workers, on CPUs.

`tests/checkpoint_engine/test_correctness_on_gpu.py` of verl 0.9.1 needs CUDA and Qwen3-8B. Ported: the same manager, worker
groups and calls, with a tiny model, every tensor compared bit for bit.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed: make integrations")

import ray
from ray.exceptions import RayTaskError
from resharder.client import Operator
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig

from tests.integrations.ray_cluster import start
from tests.integrations.verl_workers import Replica, RolloutWorker, TrainerWorker
from tests.support.daemon import Daemon
from tests.support.tiny_hf import save_checkpoint, tiny_config

pytestmark = pytest.mark.integrations

TRAINERS, ROLLOUTS = 2, 6
MODULE = "resharder.client.integrations.verl"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_config("qwen3", num_hidden_layers=2), seed=3)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with start(TRAINERS + ROLLOUTS, {}):
        yield


class Job:
    """Worker groups of one job, and verl's manager."""

    def __init__(self, engine: str, folder: Path, **arguments: object) -> None:
        self.config = CheckpointEngineConfig(
            backend="resharder",
            custom_backend_module=MODULE,
            update_weights_bucket_megabytes=1,
            engine_kwargs={"resharder": arguments},
        )
        model = HFModelConfig(path=str(folder))
        rollout = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=self.config)
        self.actors = group(TRAINERS, RayClassWithInitArgs(ray.remote(TrainerWorker), engine, model, self.config))
        self.rollouts = group(
            ROLLOUTS, RayClassWithInitArgs(ray.remote(RolloutWorker), rollout_config=rollout, model_config=model)
        )
        replicas = [Replica(replica_rank=rank, config=rollout, model_config=model) for rank in range(ROLLOUTS)]
        for replica in replicas:
            asyncio.run(replica.init_hybrid(self.rollouts))
        self.manager = CheckpointEngineManager(config=self.config, actor_wg=self.actors, replicas=replicas)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for workers in (self.actors, self.rollouts):
            for worker in workers.workers:
                ray.kill(worker)
            for placement in workers.resource_pool.get_placement_groups():
                ray.util.remove_placement_group(placement)


def group(count: int, workers: RayClassWithInitArgs) -> RayWorkerGroup:
    pool = RayResourcePool(process_on_nodes=[count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=workers, device_name="cpu")


@pytest.mark.parametrize("engine", ["megatron", "stream"])
def test_every_rollout_receives_every_tensor_of_every_update(engine: str, daemon: Daemon, folder: Path) -> None:
    with Job(engine, folder, model=engine, endpoint=daemon.endpoint) as job:
        for count, step in enumerate([None, None, 7], start=1):
            metrics = job.manager.update_weights(global_steps=step)
            assert metrics["resharder/version"] == count
            assert job.rollouts.differing(2.0 ** (count - 1)) == [[]] * ROLLOUTS
            job.actors.scale(2.0)
    with Operator(daemon.endpoint) as operator:
        versions = operator.versions(engine)
        assert sorted(version.step for version in versions) == [1, 2, 7]
        assert {len(version.slots) or TRAINERS for version in versions} == {TRAINERS}


def test_workers_of_following_servers_copy_nothing_and_fail_where_none_follows(daemon: Daemon, folder: Path) -> None:
    with Job("megatron", folder, model="followed", endpoint=daemon.endpoint, follow=True, timeout=5.0) as job:
        expected = "models/followed/versions/1 is not served by all after 5 s: it is by 0 of 0 servers"
        with pytest.raises(RayTaskError, match=expected):
            job.manager.update_weights()
        assert job.rollouts.count() == [0] * ROLLOUTS

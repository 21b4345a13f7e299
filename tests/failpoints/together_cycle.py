"""One cycle of versions that are READY together, with one fault in it: of each step, BF16 to keep and FP8 to serve.

Two ranks have a half of the model's tensors each, and publish both models by one call. At every moment, a step is READY of both
models or of neither, also for daemons that are started again; READY versions have the bytes of their step.
"""

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import torch
from resharder.client import Publisher, connect
from resharder.client.errors import ConversionError, ResharderError
from resharder.v1 import operator_pb2, operator_pb2_grpc, resources_pb2
from safetensors.torch import load_file

from tests.failpoints.cases import DECIDED, LEASE, Case
from tests.failpoints.cycle import BOUND, DOCUMENTED, Failed, KeptDaemon, Report
from tests.failpoints.roles import PATIENCE
from tests.support.fp8_reference import FP8, cast
from tests.support.remote import Gone, Refusal, Remote
from tests.support.weights import random_weights

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 192, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}  # fmt: skip
KEPT, SERVED = MODELS = ("keep", "serve")
RANKS = 2
SPOILT = "model.layers.0.self_attn.q_proj.weight"
_READY_WAIT = 2 * LEASE  # a rank waits no longer for a version that another rank may have left
Version = resources_pb2.Version


def weights(step: int) -> dict[str, torch.Tensor]:
    return random_weights(CONFIG, step, torch.bfloat16)


class Rank:
    """A rank with every other tensor of the model. Its steps are the seeds of its weights."""

    preloaded = ("tests.failpoints.light_server",)  # compilers of casts take seconds to import

    def __init__(self, endpoint: str, rank: int) -> None:
        self._endpoint, self._rank = endpoint, rank
        self._publisher: Publisher | None = None
        self._model = {name: tensor.clone() for name, tensor in list(weights(0).items())[rank::RANKS]}

    def register(self, job: str, transport: str, direct_wait: float) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = connect(
            self._endpoint, model=KEPT, job=job, rank=self._rank, world_size=RANKS, transport=transport, also={SERVED: FP8},
            direct_wait=direct_wait, staging_timeout=PATIENCE, register_timeout=3 * LEASE,
        )  # fmt: skip
        self._publisher.attach(self._model, CONFIG, ranks=[0])  # no rank has a tensor of another one

    def publish(self, step: int) -> None:
        """Return once the step is READY. Raises AssertionError if that is so of one model alone."""
        assert self._publisher is not None
        for name, tensor in weights(step).items():
            if name in self._model:
                self._model[name].copy_(tensor)
        handle = self._publisher.publish(step)
        handle.wait_ready(_READY_WAIT)
        found = handle.also[SERVED].progress().state
        assert found == "READY", f"{handle.name} is READY, {handle.also[SERVED].name} is {found}"

    def spoil(self, step: int) -> None:
        """Publish a step that one rank cannot cast."""
        assert self._publisher is not None
        if SPOILT in self._model:
            self._model[SPOILT][3, 5] = float("nan")
        with suppress(ResharderError, ConversionError):
            self._publisher.publish(step)


class ArmedDaemon(KeptDaemon):
    """A daemon with another environment from its second process on."""

    later: Mapping[str, str] = {}

    def launch(self, *, failpoint: str = "") -> Any:
        if self.starts > 1:
            self.environment |= self.later
        return super().launch(failpoint=failpoint)


class TogetherCycle:
    """The processes of one case, in a folder of their own."""

    def __init__(self, case: Case) -> None:
        self.case, self.report = case, Report(case)
        self.folder = Path(tempfile.mkdtemp(prefix="resharder-cycle-"))
        self.mark = self.folder / "mark"
        self.daemon = ArmedDaemon(lease_seconds=LEASE, keep_count=20, data_listen="127.0.0.1:0")
        self.daemon.environment["RESHARDER_CYCLE"] = str(self.folder)
        self.actors: dict[int, Remote] = {}
        self.job: tuple[str, str, float] = ("", "", 0.0)
        self.step, self.ready = 0, dict[str, dict[int, str]]()  # fingerprints of READY versions by step, of each model
        self.spoilt = set[int]()
        self._over, self._apart, self._looking = threading.Event(), "", threading.Lock()

    def environment(self, place: str, spec: str = "", mark: str = "mark") -> dict[str, str]:
        given = {"RESHARDER_CYCLE": str(self.folder)}
        if place == self.case.place:
            given |= {"RESHARDER_FAILPOINT": spec or self.case.spec, "RESHARDER_FAILPOINT_MARK": str(self.folder / mark)}
        return given

    def run(self) -> Report:
        began = time.monotonic()
        watch = threading.Thread(target=self._watch, daemon=True)
        try:
            watch.start()
            self._run()
        except Exception as error:
            self.report.problem = f"{type(error).__name__}: {error}"
        finally:
            self._over.set()
            watch.join()
            self.close()
        self.report.problem = self._apart or self.report.problem
        self.report.deaths += ["daemon"] * (self.daemon.starts - 1)
        self.report.reached = self.mark.exists()
        self.report.seconds = time.monotonic() - began
        if not self.report.problem:
            shutil.rmtree(self.folder)
        return self.report

    # Steps

    def _run(self) -> None:
        if self.case.point in DECIDED:
            self.daemon.environment |= self.environment("daemon", "commit.before-rename@4=kill", "decided")
            self.daemon.later = self.environment("daemon")
        else:
            self.daemon.environment |= self.environment("daemon")
        self.daemon.keep()
        self.register("a", "auto")
        self.published()
        self.published()
        self.step += 1
        self.spoilt.add(self.step)
        self.both(lambda rank: self.attempt(rank, "spoil", self.step))
        self.published()
        self.register("b", "grpc")
        self.published()
        self.register("c", "http", 0.5)
        self.published()
        self.check()
        assert self.daemon.process is not None
        self.daemon.process.kill()
        self.published()
        self.check()
        self.nothing_is_left_behind()

    def register(self, job: str, transport: str, direct_wait: float = 0.0) -> None:
        self.job = job, transport, direct_wait
        deadline = time.monotonic() + BOUND
        while not all(self.both(lambda rank: self.attempt(rank, "register", *self.job))):
            if time.monotonic() > deadline:
                raise Failed(f"job {job} is not registered within {BOUND:g} s: {self.report.refusals[-4:]}")

    def published(self) -> None:
        """Publish one step after another until one is READY."""
        deadline = time.monotonic() + BOUND
        while True:
            self.step += 1
            if all(self.both(lambda rank: self.attempt(rank, "publish", self.step))):
                return
            if time.monotonic() > deadline:
                raise Failed(f"no step is READY within {BOUND:g} s: {self.report.refusals[-4:]}")

    def both(self, act: Callable[[int], bool]) -> list[bool]:
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(act, range(RANKS)))

    def attempt(self, rank: int, method: str, *args: Any) -> bool:
        """Call a rank once; a rank that is not alive is started, and registered unless that is the call."""
        try:
            actor = self.actors.get(rank)
            if actor is None:
                actor = self.actors[rank] = Remote(Rank, self.daemon.endpoint, rank, environment=self.environment("trainer"))
                if method != "register":
                    actor.call("register", *self.job)
            actor.call(method, *args)
            return True
        except Gone:
            self.report.deaths.append(f"rank {rank}")
            self.actors.pop(rank).close()
        except Refusal as refusal:
            self.report.refusals.append(str(refusal)[:200])
            injected = f"failpoint {self.case.point}" in refusal.text and refusal.reason == "OSError"
            if refusal.reason not in DOCUMENTED and not injected:
                raise Failed(f"an undocumented error: {refusal}") from refusal
            if "register" in str(refusal):  # a rank that did not register does so at the next attempt
                self.actors.pop(rank).close()
        return False

    # State of the daemon

    def _watch(self) -> None:
        while not self._over.wait(0.002) and not self._apart:
            try:
                self.look()
            except Failed as error:
                self._apart = str(error)
            except grpc.RpcError:
                continue

    def look(self) -> dict[str, dict[int, str]]:
        """Return READY steps and fingerprints of each model.

        Raises Failed if a step is READY of one model and, thereafter, not of the other, or is no longer READY.
        """
        with self._looking:  # an answer that another thread asked for before lacks what is READY since
            return self._look()

    def _look(self) -> dict[str, dict[int, str]]:
        found: dict[str, dict[int, str]] = {}
        for first, second in (MODELS, MODELS[::-1]):
            earlier = {step: v.fingerprint for step, v in self.versions(first).items() if v.state == Version.READY}
            later = self.versions(second)
            for step in earlier:
                state = Version.State.Name(later[step].state) if step in later else "missing"
                if state != "READY":
                    raise Failed(f"step {step} is READY of {first} and {state} of {second}")
            if lost := self.ready.get(first, {}).items() - earlier.items():
                raise Failed(f"{first}: steps {sorted(lost)} were READY, now these are: {earlier}")
            found[first] = self.ready[first] = earlier
        return found

    def versions(self, model: str) -> dict[int, resources_pb2.Version]:
        """Return the newest version of each step."""
        stub = operator_pb2_grpc.OperatorServiceStub(self.daemon.channel)
        request = operator_pb2.ListVersionsRequest(model=model, page_size=500)
        try:
            listed = stub.ListVersions(request, timeout=5).versions
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return {}
            raise
        return {version.step: version for version in sorted(listed, key=lambda version: version.number)}

    def check(self) -> None:
        """Raise Failed for the first promise that does not hold."""
        deadline = time.monotonic() + BOUND
        while True:
            with suppress(grpc.RpcError):
                states = {v.state for model in MODELS for v in self.versions(model).values()}
                if Version.UPLOADING not in states:
                    ready = self.look()
                    break
            if time.monotonic() > deadline:
                raise Failed("a version is still UPLOADING")
            time.sleep(0.1)
        if bad := self.spoilt & ready[KEPT].keys():
            raise Failed(f"steps {bad} are READY, which one rank could not cast")
        for step in ready[KEPT]:
            for model in MODELS:
                self.has_the_bytes_of_its_step(model, step)

    def has_the_bytes_of_its_step(self, model: str, step: int) -> None:
        folder = self.daemon.store / f"models/{model}/versions/{self.versions(model)[step].number:08}"
        expected = weights(step)
        if model == SERVED:
            expected = cast(expected, json.loads((folder / "config.json").read_text()))
        found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        if found.keys() != expected.keys():
            raise Failed(f"step {step} of {model} has the tensors {sorted(found)}")
        for name, tensor in expected.items():
            if found[name].dtype != tensor.dtype or not torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)):
                raise Failed(f"{name} of step {step} of {model} has other bytes")

    def nothing_is_left_behind(self) -> None:
        for actor in self.actors.values():
            actor.close()
        self.actors.clear()
        self._over.set()
        deadline = time.monotonic() + BOUND
        models = self.daemon.store / "models"
        while left := [str(path) for kind in ("staging", "retired") for path in models.glob(f"*/{kind}/*")]:
            if time.monotonic() > deadline:
                raise Failed(f"left in the store: {left}")
            time.sleep(0.1)
        for model, steps in self.ready.items():
            if (stored := len(list(models.glob(f"{model}/versions/*")))) != len(steps):
                raise Failed(f"READY of {model} are the steps {sorted(steps)}, the store has {stored} versions")
        if (self.daemon.store / "decision.json").exists():
            raise Failed("a decision is left in the store")
        self.daemon.let_go()
        if (status := self.daemon.stop()) != 0:
            raise Failed(f"the daemon ended with {status}")
        log = self.daemon.log.read_text()
        if found := re.search(r"Traceback|INTERNAL", log):
            raise Failed(f"the daemon logs a fault of its own: {log[max(0, found.start() - 1000) :][:3000]}")

    def close(self) -> None:
        for actor in self.actors.values():
            actor.close()
        self.actors.clear()
        self.daemon.let_go()
        with suppress(OSError):
            shutil.copy(self.daemon.log, self.folder / "daemon.log")
        self.daemon.close()

"""The roles of the processes of a cycle, next to the daemon: a trainer, a server and an operator (`tests.support.remote`)."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from resharder.client import Publisher, connect
from resharder.client.operator import Operator
from resharder.client.tools.import_checkpoint import import_checkpoint

from tests.support.remote import Refusal, Remote

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 32}
SHAPES = {"embed": (torch.bfloat16, (64, 32)), "norm": (torch.float32, (32,)), "head": (torch.bfloat16, (64, 32))}
PATIENCE = 20.0  # seconds that one wait of a client may take


def weights(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, (dtype, shape) in SHAPES.items()}


class Trainer:
    """One rank with the whole model. Its steps are the seeds of its weights."""

    direct_wait = 2.0

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._publisher: Publisher | None = None
        self._model: dict[str, torch.Tensor] = {}

    def register(self, job: str, transport: str, direct: bool) -> None:
        if self._publisher is not None:
            self._publisher.close()
        options: dict[str, Any] = {"direct_wait": self.direct_wait} if direct else {}
        self._publisher = connect(
            self._endpoint, model="policy", job=job, rank=0, world_size=1, config=CONFIG, transport=transport, **options
        )
        self._model = {name: tensor.clone() for name, tensor in weights(0).items()} if direct else {}
        if direct:
            self._publisher.attach(self._model, CONFIG)
        else:
            self._publisher.attach_tensors([(name, dtype, shape) for name, (dtype, shape) in SHAPES.items()])

    def publish(self, step: int) -> int:
        """The number of a READY version."""
        assert self._publisher is not None
        if self._model:
            for name, tensor in weights(step).items():
                self._model[name].copy_(tensor)
            handle = self._publisher.publish(step)
        else:
            handle = self._publisher.publish_tensors(step, weights(step).items())
        handle.wait_ready(PATIENCE)
        return handle.version

    def give_up(self, step: int) -> None:
        """Fail in the middle of a version."""
        assert self._publisher is not None

        def half() -> Iterator[tuple[str, torch.Tensor]]:
            yield next(iter(weights(step).items()))
            raise InterruptedError("the trainer gives up")

        with suppress(InterruptedError):
            self._publisher.publish_tensors(step, half)


class Console:
    """An operator's calls."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def fleet(self, verb: str, **options: Any) -> None:
        with Operator(self._endpoint, connect_timeout=PATIENCE) as operator:
            getattr(operator, verb)("policy", **options)

    def version(self, verb: str, number: int) -> None:
        with Operator(self._endpoint, connect_timeout=PATIENCE) as operator:
            getattr(operator, verb)([number] if verb == "gc" else number, model="policy")

    def export(self, number: int, folder: str) -> None:
        if not Path(folder).exists():
            with Operator(self._endpoint, connect_timeout=PATIENCE) as operator:
                operator.export(number, Path(folder), model="policy")

    def bring_in(self, folder: str, step: int) -> int:
        return import_checkpoint(self._endpoint, folder, "policy", step=step, take_over=True, serve=True).number


class _Warm(Console):
    preloaded = ("tests.failpoints.light_server",)


def warm() -> None:
    """Start the two processes from which all others are forked, whose imports take longer than a cycle may."""
    for role in (Console, _Warm):
        with Remote(role, "127.0.0.1:1") as console, suppress(Refusal):
            console.call("export", 0, "/", timeout=300)

"""The processes of a cycle, next to the daemon: a trainer, a server and an operator, each forked and driven over a pipe.

A role is a class whose methods run in the child. `Actor.call` returns a method's result, raises `Refusal` with the reason of
the error that it raised, and `Gone` if the process died.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from resharder.client import Publisher, ResharderError, connect
from resharder.client.operator import Operator
from resharder.client.tools.import_checkpoint import import_checkpoint
from resharder.converters import failpoints

CONFIG = {"model_type": "nobody", "architectures": ["NobodyForCausalLM"], "hidden_size": 32}
SHAPES = {"embed": (torch.bfloat16, (64, 32)), "norm": (torch.float32, (32,)), "head": (torch.bfloat16, (64, 32))}
PATIENCE = 20.0  # seconds that one wait of a client may take


class Gone(Exception):
    """The process died."""


class Refusal(Exception):
    """A method raised. `reason` is that of a ResharderError, or the name of another error's class."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(f"{reason}: {text}")
        self.reason, self.text = reason, text


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


class Actor:
    """A child process with one role.

    Args:
        role: The class, at the top of a module.
        arguments: Of its constructor.
        environment: Of the process, from its first line on.
    """

    def __init__(self, role: type, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.failpoints.preload"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, role, dict(arguments), dict(environment)))
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any, timeout: float = 3 * PATIENCE, **options: Any) -> Any:
        try:
            self._pipe.send((method, args, options))
            if not self._pipe.poll(timeout):
                raise TimeoutError(f"{method} took longer than {timeout:g} s")
            result, reason, text = self._pipe.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            raise Gone(method) from error
        if reason:
            raise Refusal(reason, text)
        return result

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def close(self) -> None:
        self._process.kill()
        self._process.join(30)
        self._pipe.close()


def warm() -> None:
    """Import everything once, in the process that all others are forked from."""
    actor = Actor(Console, {"endpoint": "127.0.0.1:1"}, {})
    with suppress(Refusal):
        actor.call("export", 0, "/", timeout=300)
    actor.close()


def _serve(pipe: Connection, role: type, arguments: dict[str, Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    failpoints.arm(environment.get("RESHARDER_FAILPOINT", ""), environment.get("RESHARDER_FAILPOINT_MARK", ""))
    _end_with_parent()
    made = _answered(lambda: role(**arguments))
    while True:
        try:
            method, args, options = pipe.recv()
        except EOFError:
            os._exit(0)
        instance, reason, text = made
        answer = (None, reason, text) if reason else _answered(lambda: getattr(instance, method)(*args, **options))  # noqa: B023
        pipe.send(answer)


def _answered(act: Callable[[], Any]) -> tuple[Any, str, str]:
    try:
        return act(), "", ""
    except ResharderError as error:
        return None, error.reason, f"{type(error).__name__}: {error}"
    except Exception as error:
        return None, type(error).__name__, str(error)


def _end_with_parent() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

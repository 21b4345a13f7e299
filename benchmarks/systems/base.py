"""What a weight-sync system is to `benchmarks.compare`: a `System`, with a `Site` in the benchmark's process and a `Sender` in
the trainer's.

The benchmark starts a trainer process and a vLLM server for each system, and asks the trainer for versions. `README.md` beside
this file says how to add a system, and what each point means.
"""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.weights import Checkpoint

Points = dict[str, float]
"""Seconds since 1970 at which a version was `transferred`, `verified` and `ready`, as far as a system has these points."""


class Setup(NamedTuple):
    """A comparison: the model, and where trainer and server run.

    Attributes:
        config: content of config.json.
        kind: the option of Megatron's parallelism that a trainer of this model uses: `tp` or `ep`.
        folder: has config.json and a tokenizer.
        gpus: that of the trainer and that of the server; empty on a CPU.
    """

    config: dict[str, Any]
    kind: str
    folder: str
    gpus: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the trainer's device, in its process."""
        return torch.device("cuda", 0) if self.gpus else torch.device("cpu")

    @property
    def own(self) -> Path:
        return Path(self.folder)


@dataclass
class Site:
    """What a system needs beside the trainer.

    Attributes:
        arguments: further ones of the vLLM server.
        environment: further one of the server and of the trainer.
        plugins: vLLM's plugins in the server.
        folder: the folder that the server serves, if not the one with the config alone.
    """

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] = ()
    folder: Path | None = None

    def settle(self, version: int) -> tuple[Points, str]:
        """Wait until the server has a version for good; return points that the trainer does not know, and the way it took."""
        return {}, ""


class Sender(ABC):
    """The trainer's half of a system, in the trainer's process. It holds the weights."""

    @abstractmethod
    def fill(self, seed: int) -> None:
        """Set the weights to those of `seed`, as an optimizer step would."""

    @abstractmethod
    def open(self, server: str) -> None:
        """Connect. `server`: `host:port` of the vLLM server, which is ready, unless the system boots it from the trainer."""

    @abstractmethod
    def publish(self, step: int) -> int:
        """Publish the weights, and return the version's number as soon as the trainer may change them."""

    def settle(self) -> Points:
        """Wait for what goes on after `publish`, and return the points that are known here. Raises what failed meanwhile."""
        return {}


class WholeTensors(Sender):
    """A trainer that holds each tensor of the checkpoint whole, on one device: what the peers take. They gather nothing then."""

    def __init__(self, setup: Setup, device: torch.device | None = None) -> None:
        self.device = device or setup.device
        self.checkpoint = Checkpoint(setup.config, self.device)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.checkpoint.tensors

    def fill(self, seed: int) -> None:
        self.checkpoint.fill(seed)


class System(ABC):
    """A weight-sync system."""

    name: str
    """Its key on the command line and in tables."""
    boots_from_trainer = False
    """Whether the server starts with a version of the trainer's. Otherwise it starts with random weights."""

    @abstractmethod
    def unavailable(self, setup: Setup) -> str:
        """Return why it cannot run here, as one sentence without a full stop; empty if it can."""

    def visible(self, setup: Setup) -> str:
        """Return the GPUs that the trainer's process sees."""
        return setup.gpus[0] if setup.gpus else ""

    @contextmanager
    def site(self, setup: Setup) -> Iterator[Site]:
        """Run what it needs beside trainer and server."""
        yield Site()

    @abstractmethod
    def sender(self, setup: Setup) -> Sender:
        """Return the trainer's half; called in the trainer's process, once the server has been started."""


class TransferAlone(ABC):
    """A transfer between two processes, without a server: only its duration can be compared."""

    name: str

    @abstractmethod
    def unavailable(self, setup: Setup) -> str:
        """Return why it cannot run here, as one sentence without a full stop; empty if it can."""

    @abstractmethod
    @contextmanager
    def running(self, setup: Setup) -> Iterator[Callable[[], float]]:
        """Yield a function that transfers all tensors once and returns the seconds. Raises unless a first transfer was right."""


@dataclass(frozen=True)
class Absent(System):
    """A system that is known and cannot be run by this benchmark, with the reason."""

    name: str
    reason: str

    def unavailable(self, setup: Setup) -> str:
        return self.reason

    def sender(self, setup: Setup) -> Sender:
        raise NotImplementedError(self.reason)


def write_folder(setup: Setup, folder: Path, seed: int) -> None:
    """Write the weights of a seed as a checkpoint, in a process of its own, on the trainer's GPU if there is one."""
    visible = {"CUDA_VISIBLE_DEVICES": setup.gpus[0]} if setup.gpus else {}
    command = [sys.executable, "-m", "benchmarks.weights", str(setup.own), str(folder), str(seed), setup.device.type]
    subprocess.run(command, check=True, env=os.environ | visible)


def missing(*modules: str) -> str:
    """Return the first of these modules that cannot be imported; empty if all can."""
    return next((module for module in modules if not _found(module)), "")


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def needs_gpus(setup: Setup, apart: bool = False) -> str:
    """Return what the GPUs lack; `apart`: trainer and server need one each."""
    if not setup.gpus:
        return "needs a GPU"
    return "needs two GPUs" if apart and len(set(setup.gpus)) < 2 else ""

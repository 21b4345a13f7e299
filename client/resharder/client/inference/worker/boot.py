"""The boot of a worker from the daemon: the claim of the server, and the load of the version that all its ranks boot.

All processes of a server share its id, and the first claim of the id fixes the version.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from resharder.client.errors import NO_VERSION, DaemonUnreachable, ResharderError, UsageError
from resharder.client.inference.engine import Host
from resharder.client.inference.recording import inventory, recorder
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.worker import install
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.claim import Renewal, claim
from resharder.client.inference.worker.install import Feed, Installed
from resharder.client.inference.worker.memory import Fault
from resharder.client.inference.worker.model_part import ModelPart
from resharder.client.inference.worker.source import Sources, VersionSource
from resharder.client.rpc.channel import Channel
from resharder.client.tracing import Timings, timed
from resharder.client.versions.manifest import VersionManifest, get_manifest
from resharder.converters.failpoints import failpoint


def begin(host: Host, settings: PluginSettings) -> Agent | None:
    """Create the worker's agent and claim the server.

    Args:
        host: The worker process.
        settings: The plugin's settings.

    Returns:
        The agent with its boot version; `None` if the server may start on the engine's own weights and the daemon has none.

    Raises:
        ResharderError: The claim failed.
        InstallError: The engine has another config.json than the version.
    """
    channel = Channel(settings.endpoint)
    # One renewal for the whole server, because its processes end together.
    renewal = Renewal() if host.rank == 0 else None
    wait, patience = (0.0, 5.0) if settings.prefer else (settings.boot_wait_seconds,) * 2
    try:
        failpoint("worker.boot.claim")
        answer = claim(channel, settings, boot=True, renews=renewal is not None, wait_seconds=wait, patience=patience)
        if renewal is not None:
            renewal.begin()
        failpoint("worker.boot.claimed")
        boot = get_manifest(channel, f"models/{answer.model.removeprefix('models/')}/versions/{answer.boot_version}")
    except ResharderError as error:
        if renewal is not None:
            renewal.close()
        if settings.prefer and is_missing(error):
            return None
        raise
    agent = Agent(host, settings, channel, boot, renewal)
    agent.parts.check_config(boot.name, boot.config, booting=True)
    agent.staging.connect(answer.store)
    return agent


@dataclass
class Booting:
    """The boot of one of a worker's models."""

    agent: Agent
    sources: Sources
    manifest: VersionManifest
    part: ModelPart
    source: VersionSource | None = None
    installed: Installed = field(default_factory=lambda: Installed(0, 0, 0.0))
    stage_seconds: float = 0.0
    timings: Timings = field(default_factory=list)

    def load(self, model: torch.nn.Module) -> None:
        """Record the model, stage the version and feed it to `load_weights`. Call it before the engine's post-processing."""
        inventory.before_loading(model)
        host = self.agent.host
        self.part.record(recorder.record(model, self.manifest.specs, host.original_loader, host.defaults), self.manifest)
        self.agent.parts.count_needed_bytes()
        recording = self.part.known
        with timed(self.timings, "stage"):
            self.source = self.sources.open(self.manifest, recording.needs)
            self.source.populate(recording.needs)
        self.stage_seconds = self.timings[-1].seconds
        names = [name for name in self.manifest.specs if name in recording.needs]
        failpoint("worker.boot.load")
        feed = Feed(self.source, names, recording, Fault.from_environment())
        with timed(self.timings, "load"):
            cast(Any, model).load_weights(iter(feed))
        install.refuse(feed.differences())
        self.installed = Installed(len(feed.boxes), 0, 0.0)

    def verify(self, model: torch.nn.Module) -> None:
        """Compare memory with the store after the engine's post-processing, decide the route, and report the boot."""
        if self.source is None:
            raise UsageError("the engine has loaded a model without calling load_weights")
        failpoint("worker.boot.verify")
        with self.agent.host.calling():
            self.part.decide_route(model, self.source)
        self.agent.verifier.expect(self.part, self.source.expected)
        self.source.close()
        self.agent.booted(self.manifest, self.installed, self.stage_seconds, self.timings)


def is_missing(error: ResharderError) -> bool:
    """Return whether the daemon is away or has no version; `prefer` does not apply to other errors."""
    return isinstance(error, DaemonUnreachable) or error.reason == NO_VERSION

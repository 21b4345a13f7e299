"""Agents of workers that boot from a daemon, without vLLM."""

from types import SimpleNamespace

import torch
from resharder.client.inference.settings import PluginSettings
from resharder.client.inference.vllm.host import VLLMHost
from resharder.client.inference.worker.agent import Agent
from resharder.client.inference.worker.claim import claim
from resharder.client.inference.worker.install import Installed
from resharder.client.versions.manifest import VersionManifest, get_manifest

from tests.client.models import connected, publish_all, weights
from tests.support.daemon import Daemon


def publish(daemon: Daemon, seed: int) -> str:
    """A READY version's name."""
    (publisher,) = connected(daemon.endpoint, 1, f"job{seed}")
    (handle,) = publish_all([publisher], seed, weights(seed))
    handle.wait_ready(60)
    publisher.close()
    return handle.name


def agent_of(daemon: Daemon) -> Agent:
    host = VLLMHost(SimpleNamespace(), torch.device("cpu"), 0)
    return Agent(host, PluginSettings(daemon.endpoint, "s", "policy"))


def booted(daemon: Daemon) -> tuple[Agent, VersionManifest]:
    """A worker as it is after it has loaded version 1."""
    agent, manifest = agent_of(daemon), get_manifest_of(daemon, publish(daemon, 1))
    claim(agent.channel, agent.settings, boot=True, patience=60)
    agent.booted(manifest, Installed(7, 0, 0.0), 0.5)
    return agent, manifest


def get_manifest_of(daemon: Daemon, version: str) -> VersionManifest:
    return get_manifest(agent_of(daemon).channel, version)

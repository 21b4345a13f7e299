"""A trainer and a server on emulated hosts, with a model that takes a second over the link between them."""

import os
from typing import Any

import torch

from tests.failpoints import roles
from tests.failpoints.light_server import LightServer, fingerprint
from tests.support.direct_jobs import Job

SHAPES = {"embed": (torch.bfloat16, (1024, 1024)), "norm": (torch.float32, (32,)), "head": (torch.bfloat16, (1024, 1024))}


class HostTrainer(roles.Trainer):
    """`roles.Trainer` of a larger model."""

    direct_wait = 60.0
    preloaded = ("tests.failpoints.light_server",)  # which this module needs

    def __init__(self, endpoint: str) -> None:
        roles.SHAPES.update(SHAPES)
        super().__init__(endpoint)

    def use_interface(self, name: str) -> None:
        """Select the interface of later groups; empty for none."""
        os.environ["GLOO_SOCKET_IFNAME"] = name

    def fingerprint(self, step: int) -> str:
        """Fingerprint of a step's weights."""
        return fingerprint(roles.weights(step).items())


class HostServer(LightServer):
    """`LightServer` of a larger model."""

    def __init__(self, served: str) -> None:
        roles.SHAPES.update(SHAPES)
        super().__init__(served)


class HostJob(Job):
    """`Job` of a larger model, which says nothing of the direct path."""

    preloaded = ("tests.failpoints.light_server",)  # which this module needs

    def __init__(self, endpoint: str, job: str, **options: Any) -> None:
        roles.SHAPES.update(SHAPES)
        super().__init__(endpoint, job, roles.CONFIG, **{"direct_wait": None, **options})

"""A trainer and a server on emulated hosts, with a model that takes a second over the link between them."""

import os

import torch

from tests.failpoints import roles
from tests.failpoints.light_server import LightServer, fingerprint
from tests.support.namespaces import enter

SHAPES = {"embed": (torch.bfloat16, (1024, 1024)), "norm": (torch.float32, (32,)), "head": (torch.bfloat16, (1024, 1024))}


def _begin(namespace: str) -> None:
    enter(namespace)
    roles.SHAPES.update(SHAPES)


class HostTrainer(roles.Trainer):
    """`roles.Trainer` in a network namespace."""

    direct_wait = 60.0

    def __init__(self, namespace: str, endpoint: str) -> None:
        _begin(namespace)
        super().__init__(endpoint)

    def use_interface(self, name: str) -> None:
        """Select the interface of later groups; empty for none."""
        os.environ["GLOO_SOCKET_IFNAME"] = name

    def fingerprint(self, step: int) -> str:
        """Fingerprint of a step's weights."""
        return fingerprint(roles.weights(step).items())


class HostServer(LightServer):
    """`LightServer` in a network namespace."""

    def __init__(self, namespace: str, served: str) -> None:
        _begin(namespace)
        super().__init__(served)

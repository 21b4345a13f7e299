"""Clients of the daemon. Nothing is imported before it is asked for: the command line must start fast, and workers fork.

from resharder.client import connect     # a trainer: see trainer.py
from resharder.client import fill        # its model from a checkpoint or a version: see filling.py
from resharder.client import Operator    # an operator: see operator.py
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resharder.client.errors import ResharderError
    from resharder.client.operator import Operator
    from resharder.client.rpc.tls import Tls
    from resharder.client.trainer.connect import Handle, Publisher, connect
    from resharder.client.trainer.fill import Filled, fill

__all__ = ["Filled", "Handle", "Operator", "Publisher", "ResharderError", "Tls", "connect", "fill"]

_HOMES = {
    "Filled": "resharder.client.trainer.fill",
    "Handle": "resharder.client.trainer.connect",
    "Operator": "resharder.client.operator",
    "Publisher": "resharder.client.trainer.connect",
    "ResharderError": "resharder.client.errors",
    "Tls": "resharder.client.rpc.tls",
    "connect": "resharder.client.trainer.connect",
    "fill": "resharder.client.trainer.fill",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Operator SDK: queries, commands on fleets, and copies of versions.

    with Operator("daemon:7677") as operator:
        for version in operator.versions("policy"):
            print(version.number, version.step)
        operator.export(12, Path("checkpoint"))
        asked = operator.update("policy", 12)
        operator.wait_moved(asked, timeout=600)

Answers are frozen dataclasses (`answers`). A version is its number, with its model if the daemon has several.
"""

from resharder.client.operator.fleets import FleetCommands
from resharder.client.operator.nodes import NodeCommands
from resharder.client.operator.servers import ServerCommands
from resharder.client.operator.versions import VersionCommands

__all__ = ["Operator"]


class Operator(FleetCommands, ServerCommands, NodeCommands, VersionCommands):
    """Connection to one daemon, with a method for every command of `resharder`."""

"""Operator SDK: queries, commands on fleets, and copies of versions.

    with Operator("daemon:7677") as operator:
        for version in operator.versions("policy"):
            print(version.number, version.step)
        operator.export(12, Path("checkpoint"))
        asked = operator.update("policy", 12)
        operator.wait_moved(asked, timeout=600)

Answers are frozen dataclasses (`answers`). A version is its number, with its model if the daemon has several.
"""

from resharder.client.operator.operator import Operator

__all__ = ["Operator"]

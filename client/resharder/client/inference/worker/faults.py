"""Faults that tests inject into installs (`RESHARDER_FAULT`); verification must detect each of them."""

from dataclasses import dataclass

import numpy as np
from resharder.client.inference.settings import fault as requested_fault
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.source import VersionSource
from resharder.converters.storage.digest import Array


@dataclass(frozen=True)
class Fault:
    """A fault to inject: `skip:NAME`, `misplace:NAME`, `swap:NAME,NAME` or `half-way`."""

    kind: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def from_environment() -> "Fault":
        """Read the fault from `RESHARDER_FAULT`."""
        return Fault(*requested_fault())

    def applied(self, name: str, source: VersionSource) -> Array | None:
        """Return the array to install for the HF tensor `name`; `None` to skip it."""
        array = source.arrays[name]
        if name not in self.names:
            return array
        if self.kind == "skip":
            return None
        if self.kind == "misplace":
            return np.roll(array, 1)
        other = self.names[1 - self.names.index(name)]
        return source.arrays[other]

    def half_way(self) -> None:
        """Raise `InstallError` if the fault is `half-way`."""
        if self.kind == "half-way":
            raise InstallError("stopped half-way: RESHARDER_FAULT is half-way")

"""Faults that tests inject into installs (RESHARDER_FAULT); verification must notice each of them."""

from dataclasses import dataclass

import numpy as np
from resharder.client.inference.settings import fault as asked_fault
from resharder.client.inference.worker.errors import InstallError
from resharder.client.inference.worker.source import VersionSource
from resharder.converters.storage.digest import Array


@dataclass(frozen=True)
class Fault:
    """What tests ask for by RESHARDER_FAULT: `skip:NAME`, `misplace:NAME`, `swap:NAME,NAME`, `half-way`. Each must be noticed."""

    kind: str = ""
    names: tuple[str, ...] = ()

    @staticmethod
    def from_environment() -> "Fault":
        return Fault(*asked_fault())

    def applied(self, name: str, source: VersionSource) -> Array | None:
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
        if self.kind == "half-way":
            raise InstallError("stopped half-way, as RESHARDER_FAULT says")

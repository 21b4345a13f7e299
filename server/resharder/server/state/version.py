"""The record of one version and its states: UPLOADING, then READY and RETIRED, or ABORTED."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from blake3 import blake3
from resharder.converters.json_input import check_fields, is_text

LAST_NUMBER = (1 << 62) - 1
"""Highest number or epoch of a version; the next ones fit into the protocol as well."""
UPLOADING, READY, RETIRED, ABORTED = "UPLOADING", "READY", "RETIRED", "ABORTED"
LOST = "LOST"
"""First word of the reason of a RETIRED version whose bytes are lost."""


@dataclass(frozen=True)
class VersionRecord:
    """Record of one version, replaced at each change of its state.

    Times are in seconds since 1970. `slots` has the BLAKE3 of each rank's digests, so that a repeated seal can be compared.
    """

    model: str
    number: int
    state: str
    epoch: int
    step: int
    job: str
    size_bytes: int
    tensor_count: int
    create_time: float
    ready_time: float = 0.0
    fingerprint: str = ""
    reason: str = ""
    slots: tuple[tuple[int, str], ...] = ()
    set_aside: bool = False
    """Whether LATEST skips it while the model has another READY version."""
    end_time: float = 0.0
    """Time at which it became RETIRED or ABORTED; 0 if unknown."""
    warnings: tuple[str, ...] = ()
    """Texts of refusals that RESHARDER_ALLOW allowed on its ranks."""

    @property
    def name(self) -> str:
        """Resource name, `models/{model}/versions/{number}`."""
        return f"models/{self.model}/versions/{self.number}"

    @property
    def is_lost(self) -> bool:
        """Whether it was READY, and neither the store nor a node has all of its bytes."""
        return self.state == RETIRED and self.reason.startswith(f"{LOST}:")

    @property
    def ahead_fingerprint(self) -> str:
        """Fingerprint that servers report for the version until it is READY."""
        return f"ahead-{blake3(f'{self.job}/{self.epoch}/{self.number}/{self.create_time!r}'.encode()).hexdigest()[:32]}"

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Self:
        """Build a record from stored fields, ignoring fields that a later release added.

        Raises TypeError if a required field is missing, and ValueError or TypeError for a value of another type.
        """
        if not isinstance(content, Mapping):
            raise TypeError(f"expected the fields of a version, got a {type(content).__name__}")
        known = {field.name for field in fields(cls)}
        warnings = content.get("warnings", ())
        if not isinstance(warnings, list | tuple) or not all(is_text(text) for text in warnings):
            raise ValueError(f"expected warnings as a list of strings, got {str(warnings)[:40]!r}")
        values = {name: value for name, value in content.items() if name in known}
        record = cls(**values | {"warnings": tuple(warnings)})
        check_fields(record)
        if max(record.number, record.epoch) > LAST_NUMBER:
            raise ValueError(f"expected a number and an epoch of at most {LAST_NUMBER}, got {record.number} and {record.epoch}")
        return record

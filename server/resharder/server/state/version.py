"""The record of one version, its states (UPLOADING, then READY and RETIRED, or ABORTED), and resource names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from blake3 import blake3
from resharder.converters.json_input import check_fields, is_text
from resharder.server.state.errors import InvalidArgument

LAST_NUMBER = (1 << 62) - 1
"""Highest number or epoch of a version; the next ones fit into the protocol as well."""
UPLOADING, READY, RETIRED, ABORTED = "UPLOADING", "READY", "RETIRED", "ABORTED"
LOST = "LOST"
"""First word of the reason of a RETIRED version whose bytes are lost."""
DAEMON = "@daemon"
"""Id of the daemon's own host among those of nodes, which no node can have."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
    skipped: bool = False
    """Whether LATEST skips it while the model has another READY version."""
    end_time: float = 0.0
    """Time at which it became RETIRED or ABORTED; 0 if unknown."""
    warnings: tuple[str, ...] = ()
    """Texts of refusals that RESHARDER_ALLOW allowed on its ranks."""
    base: str = ""
    """Model that this one, an adapter, is loaded beside; empty for a model of its own."""
    base_version: int = 0
    """Version of `base` that the adapter was trained on; 0 if the trainer has not said it."""
    unsent_bytes: int = 0
    """Bytes of `size_bytes` that no rank has sent, because they are those of the version before."""

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
        if "set_aside" in content:  # its name in earlier builds
            values.setdefault("skipped", content["set_aside"])
        record = cls(**values | {"warnings": tuple(warnings)})
        check_fields(record)
        if max(record.number, record.epoch) > LAST_NUMBER:
            raise ValueError(f"expected a number and an epoch of at most {LAST_NUMBER}, got {record.number} and {record.epoch}")
        return record


def kind_of(base: str | None) -> str:
    """Return what a model with this base is, as a part of a sentence."""
    return f"an adapter of {base!r}" if base else "a model of its own"


def host_name(id: str) -> str:
    """Return the name of a host in messages: `nodes/{id}`, or `daemon`."""
    return "daemon" if id == DAEMON else f"nodes/{id}"


def check_model_name(name: str) -> str:
    """Return `name`. Raises InvalidArgument (MODEL_NAME) if it is not a valid model name."""
    if not MODEL_NAME.fullmatch(name):
        raise InvalidArgument(
            "MODEL_NAME",
            f"expected a model name of at most 64 letters, digits, '.', '_' and '-' that starts with a letter or digit, "
            f"got {name!r}",
        )
    return name


def parse_name(name: str, kind: str) -> tuple[str, int]:
    """Return the model and the number in `models/{model}/{kind}/{number}`. Raises InvalidArgument (RESOURCE_NAME)."""
    parts = name.split("/")
    if (
        len(parts) == 4
        and parts[0] == "models"
        and parts[2] == kind
        and parts[3].isascii()
        and parts[3].isdigit()
        and len(parts[3]) < 19
    ):
        return check_model_name(parts[1]), int(parts[3])
    raise InvalidArgument("RESOURCE_NAME", f"expected models/MODEL/{kind}/NUMBER, got {name[:200]!r}")

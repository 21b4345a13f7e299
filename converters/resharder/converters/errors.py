"""Errors of conversions, and the root of all of Resharder's errors. `resharder.client.errors` draws the whole tree."""


class ResharderError(Exception):
    """Root of all errors.

    The message states what was expected, what came and what to do.

    Attributes:
        reason: Stable name of the error: the daemon's reason if the daemon refused (docs/errors.md), else that of the class.
    """

    reason = "RESHARDER"

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or self.reason


class ConversionError(ResharderError, ValueError):
    """A model, layout or checkpoint that cannot be converted. The message names the tensor."""

    reason = "CONVERSION"


class LayoutError(ConversionError):
    """A layout with a hole or an overlap, or a tensor whose shape or dtype does not fit."""

    reason = "LAYOUT_MISMATCH"


class ReplicasDiffer(ConversionError):
    """Ranks with different values of the same elements."""

    reason = "REPLICAS_DIFFER"


class UnknownTensor(ConversionError):
    """A tensor name that the model's table or the checkpoint lacks."""

    reason = "UNKNOWN_TENSOR"


class UnsupportedModel(ConversionError):
    """An architecture or parallel layout that is not verified."""

    reason = "UNSUPPORTED_MODEL"

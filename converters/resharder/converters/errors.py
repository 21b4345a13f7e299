"""What converters refuse.

ConversionError
├── LayoutError          a layout that cannot be right: a hole, an overlap, a shape that does not fit
├── ReplicasDiffer       ranks hold different values of the same elements
├── UnknownTensor        a name that the model's table does not know, or that its checkpoint lacks
└── UnsupportedModel     an architecture or parallel layout that has no proof behind it
"""


class ConversionError(ValueError):
    """The message names the tensor, what was expected and what was found."""

    reason = "CONVERSION"


class LayoutError(ConversionError):
    reason = "LAYOUT_MISMATCH"


class ReplicasDiffer(ConversionError):
    reason = "REPLICAS_DIFFER"


class UnknownTensor(ConversionError):
    reason = "UNKNOWN_TENSOR"


class UnsupportedModel(ConversionError):
    reason = "UNSUPPORTED_MODEL"

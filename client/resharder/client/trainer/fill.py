"""Loading of a checkpoint or a version into a trainer's model, under any parallel layout.

from resharder.client import fill

fill(model_chunks, hf_config, "/checkpoints/Qwen3-8B")
fill(model_chunks, hf_config, "resharder://daemon:7677/models/policy/versions/latest")
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from resharder.client.errors import CorruptData
from resharder.client.trainer.model_files import Config, plain_config
from resharder.client.transport.host_buffers import host_bits
from resharder.client.versions.source import Wanted, WeightSource, open_source
from resharder.converters.architectures.checkpoint import expected_shapes
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor, UnsupportedModel
from resharder.converters.geometry.layout import ITEM_SIZES, Layout, Piece, box_shape, box_size, format_box
from resharder.converters.models import local_layout
from resharder.converters.models.tensor_io import read_piece, tensor_of_bits, write_piece
from resharder.converters.storage.digest import digest, digest_torch

if TYPE_CHECKING:
    from resharder.converters.models.hf_names import Model, Rename

_FLOATS = ("F64", "F32", "F16", "BF16")


class Filled(NamedTuple):
    """Result of `fill` on this rank."""

    source: str
    """The folder, or `models/{model}/versions/{number}`."""
    tensors: int
    """HF tensors of which this rank has a part."""
    bytes: int
    """Bytes of the boxes that this rank has read."""
    proven: int
    """Boxes that were verified: the digest of the model's memory equals that of the source. Boxes whose values were cast are not
    verified."""
    unused: tuple[str, ...]
    """Tensors of the source that the config does not mention, and that no rank has read."""


@torch.no_grad()
def fill(
    model: "Model",
    hf_config: Config,
    source: str | Path,
    *,
    rename: "Rename | None" = None,
    ranks: Sequence[int] | None = None,
    shared: bool = True,
) -> Filled:
    """Load weights into this rank's part of a model, replicas included. Padding becomes zero.

    Names, shapes and dtypes are checked before the first write. Values whose dtype differs from the parameter's are cast as
    `Tensor.copy_` casts (float32 to bfloat16: round to nearest, ties to even). An optimizer with fp32 copies must refresh them:
    Megatron's `optimizer.reload_model_params()`. The source may lack a tensor that the model stores in the place of another
    one, such as the copies of embedding and head in MTP layers.

    Args:
        model: Model as in `Publisher.attach`.
        hf_config: transformers config or content of config.json.
        source: Folder with a Hugging Face checkpoint in safetensors, or `resharder://HOST:PORT/models/MODEL/versions/NUMBER`
            (or `latest`: rank 0's newest version, by one broadcast, so every rank must call). Only this rank's boxes are read.
        rename: As in `Publisher.attach`.
        ranks: As in `Publisher.attach`.
        shared: Map a version's files if the daemon's store is visible here; otherwise stream them.

    Returns:
        The source and counts of tensors, bytes and boxes.

    Raises:
        UnknownTensor, LayoutError, UnsupportedModel, UsageError, NotFound: Before the first write.
        CorruptData, DaemonUnreachable: The model may be partly filled.
    """
    config = plain_config(hf_config)
    layout, tensors = local_layout(model, config, rename=rename, ranks=ranks)
    with open_source(source, shared=shared) as opened:
        layout = _without_copies(layout, opened.specs)
        wanted = _check(layout, tensors, opened)
        expected = opened.digests([key for key, pieces in wanted.items() if any(_provable(p, layout, opened) for p in pieces)])
        for tensor in tensors.values():
            tensor.zero_()
        _write(opened, wanted, tensors)
        for key, digest_there in expected.items():
            _prove(key, wanted[key], digest_there, layout, opened, tensors)
        size = sum(box_size(box) * ITEM_SIZES[opened.specs[name].dtype] for name, box in wanted)
        return Filled(opened.name, len(layout.tensors), size, len(expected), _unused(opened, config))


def _without_copies(layout: Layout, stored: Container[str]) -> Layout:
    """Return the layout without tensors that the source lacks and whose pieces are all in the place of stored ones."""
    kept = {_place(piece) for piece in layout.pieces if piece.tensor in stored}
    needed = {piece.tensor for piece in layout.pieces if piece.tensor in stored or _place(piece) not in kept}
    pieces = tuple(piece for piece in layout.pieces if piece.tensor in needed)
    return Layout({name: spec for name, spec in layout.tensors.items() if name in needed}, pieces)


def _place(piece: Piece) -> tuple[object, ...]:
    return piece.local, piece.offset, piece.strides, box_shape(piece.box), piece.plus


def _check(layout: Layout, tensors: Mapping[str, torch.Tensor], source: WeightSource) -> dict[Wanted, list[Piece]]:
    """Return the pieces into which each box of the source goes. Raises the errors that precede the first write."""
    missing = [name for name in layout.tensors if name not in source.specs]
    if missing:
        raise UnknownTensor(f"{source.name} lacks {len(missing)} tensors of the model: {_some(missing)}")
    for name, spec in layout.tensors.items():
        there = source.specs[name]
        if there.shape != spec.shape:
            raise LayoutError(f"{name}: the model has shape {list(spec.shape)}, {source.name} has {list(there.shape)}")
        if there.dtype != spec.dtype and not (there.dtype in _FLOATS and spec.dtype in _FLOATS):
            raise UnsupportedModel(
                f"{name}: the model has {spec.dtype}, and {there.dtype}, which {source.name} has, cannot be cast to it"
            )
    blank = [name for name, tensor in tensors.items() if tensor.is_meta]
    if blank:
        raise UnsupportedModel(
            f"{len(blank)} tensors of the model are on the meta device: give them memory first, as with to_empty(): "
            f"{_some(blank)}"
        )
    wanted: dict[Wanted, list[Piece]] = {}
    for piece in layout.pieces:
        wanted.setdefault((piece.tensor, piece.box), []).append(piece)
    return wanted


def _write(source: WeightSource, wanted: Mapping[Wanted, Sequence[Piece]], tensors: Mapping[str, torch.Tensor]) -> None:
    keys = list(wanted)
    for position, box, bits in source.parts(keys):
        values = tensor_of_bits(bits, source.specs[keys[position][0]].dtype)
        for piece in wanted[keys[position]]:
            write_piece(tensors, piece.part(box), values)


def _provable(piece: Piece, layout: Layout, source: WeightSource) -> bool:
    """Return whether the model has the exact bits of the source, so that digests can be compared."""
    return not piece.plus and layout.tensors[piece.tensor].dtype == source.specs[piece.tensor].dtype


def _prove(
    key: Wanted,
    pieces: Iterable[Piece],
    expected: int,
    layout: Layout,
    source: WeightSource,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    name, box = key
    shape = layout.tensors[name].shape
    for piece in pieces:
        if not _provable(piece, layout, source):
            continue
        there = read_piece(tensors, piece)
        found = digest(host_bits(there), box, shape) if there.device.type == "cpu" else digest_torch(there, box, shape)
        if found != expected:
            raise CorruptData(
                f"{name}{format_box(box)}: the model's digest is {found:#x}, that of {source.name} is {expected:#x}; "
                "tensors that the model stores in one place, such as the embeddings of MTP layers, must have equal values"
            )


def _unused(source: WeightSource, config: Mapping[str, object]) -> tuple[str, ...]:
    try:
        known = expected_shapes(config)
    except ConversionError:
        return ()
    return tuple(name for name in source.specs if name not in known)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", …" if len(names) > 4 else "")

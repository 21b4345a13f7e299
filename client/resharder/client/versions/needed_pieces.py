"""The pieces of a version that a worker needs: each contains an element of one of its boxes."""

from collections.abc import Sequence

from resharder.client.versions.remote import Needs
from resharder.converters.geometry.rows import box_rows
from resharder.converters.storage.files import FileLayout
from resharder.converters.wire.pieces import Bitmap, number_pieces


def needed_pieces(files: Sequence[FileLayout], needs: Needs) -> Bitmap:
    """Return the pieces with elements of the boxes, given by HF tensor, of a version with these files."""
    numbering = number_pieces(files)
    found = Bitmap(numbering.count)
    for file in files:
        for name in file.by_name.keys() & needs.keys():
            spec, offset = file.by_name[name]
            for box in needs[name]:
                for rows in box_rows(box, spec):
                    for start, end in rows.spans(numbering.piece_bytes - 1):  # a larger gap may have a piece of its own
                        found.add(*numbering.touched(file.path, offset + start, offset + end))
    return found

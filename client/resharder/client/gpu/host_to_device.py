"""Copies from registered host pages to a GPU's tensors, with any strides, in one or two kernels."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from resharder.client.gpu.digest import CachedDigester, Digester
from resharder.client.gpu.schedule import schedule
from resharder.client.gpu.table import Table, addresses_of, check_fit
from resharder.converters.geometry.copy_table import copies_of
from resharder.converters.geometry.layout import Layout
from resharder.converters.geometry.piece_arrays import pack
from resharder.converters.geometry.plan import plan_pieces
from resharder.converters.storage.digest import Array
from resharder.converters.storage.files import folder_layout

Tensors = Mapping[str, torch.Tensor]


class HostToDevice:
    """Copy of boxes of HF tensors, planned once for a layout and bound to addresses for every version."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Plan the copy. Values are copied without the pieces' `plus`."""
        self._layout, self._device = layout, device
        whole = folder_layout({piece.tensor: layout.tensors[piece.tensor] for piece in layout.pieces})
        copies = copies_of(plan_pieces(pack({0: whole}), pack({0: layout})), [0], [0])
        self._names, self._locals = copies.source_locals, copies.target_locals
        self._moves = schedule(copies, 0, 0).local
        self._digester = CachedDigester(layout, device)

    def place(self, arrays: Mapping[str, Array], tensors: Tensors) -> "BoundCopy":
        """Bind the copy to the addresses of tensors.

        Args:
            arrays: Whole HF tensors in registered pages, by name.
            tensors: Local tensors by name, which must not move.

        Raises KeyError and ValueError for tensors that differ from the layout.
        """
        host = np.array([(arrays[n].ctypes.data, arrays[n].ctypes.data + arrays[n].nbytes) for n in self._names], np.int64)
        device = addresses_of(self._locals, tensors, range(len(self._locals)))
        check_fit(self._moves, self._names, host.reshape(-1, 2), self._locals, device)
        begins = np.append(host.reshape(-1, 2)[:, 0], 0), np.append(device[:, 0], 0)
        table = Table(self._moves, *begins, self._device)
        table.compile()
        where = dict(zip(self._locals, device[:, 0].tolist(), strict=True))
        return BoundCopy(self._layout, where, table, self._digester.at(tensors))


@dataclass(frozen=True)
class BoundCopy:
    """Copy between fixed addresses. `where` has the address of each local tensor."""

    layout: Layout
    where: dict[str, int]
    table: Table
    digester: Digester

    def is_at(self, tensors: Tensors) -> bool:
        """Return whether these tensors are at the addresses of the copy."""
        return all(tensors[name].data_ptr() == at for name, at in self.where.items())

    def run(self) -> list[int]:
        """Copy, after the current stream's pending work, and return the digests of the device's boxes when all is done.

        Digests are in the order of the layout's pieces.
        """
        self.table.run(0)
        return self.digester.digests()

"""Digest of protocol revision 1. Versions of that time are verified with it once, then digested anew.

Elements wider than 16 bits counted as several columns of 16 bits, low ones first, with `b` in [1, 2**20). In one column of
twelve, a change of one half of an element of 32 bits could cancel a change of the other half.
"""

import numpy as np
from resharder.converters.storage.digest import COLUMN_SEED, Array, digest_rows, hashes


def digest_1(tensor: Array) -> int:
    """Return the digest of a whole tensor, a contiguous array of unsigned integers."""
    if tensor.size == 0:
        return 0
    rows = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    units = rows.view(np.uint16) if rows.itemsize > 1 else rows
    columns = np.arange(units.shape[1])
    b = (hashes(columns, COLUMN_SEED) % np.uint64((1 << 20) - 1) + np.uint64(1)).astype(np.uint32)
    return digest_rows(None, units, 0, 1, b)

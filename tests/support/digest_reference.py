"""The definition of the digest, one element at a time."""

from collections import Counter
from functools import cache

import numpy as np
import pytest
from resharder.converters.geometry.layout import Box
from resharder.converters.storage import digest as digests
from resharder.converters.storage.digest import MASK

DTYPES = [np.uint8, np.uint16, np.uint32, np.uint64]


def random_bits(shape: tuple[int, ...], dtype: type, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def reference(x: np.ndarray, box: Box, shape: tuple[int, ...]) -> int:
    """The digest of a box."""
    total = 0
    for at in np.ndindex(x.shape):
        place = [r.start + i * r.step for r, i in zip(box, at, strict=True)]
        row = int(np.ravel_multi_index(place[:-1], shape[:-1])) if len(shape) > 1 else 0
        a = splitmix64(row, 0x9E3779B97F4A7C15) | 1
        b = splitmix64(place[-1], 0xD1B54A32D192ED03) % 2**21 | 1
        total += fold(int(x[at])) * a * b
    return total & MASK


def splitmix64(index: int, seed: int) -> int:
    x = ((index + 1) * 0x9E3779B97F4A7C15 + seed) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def fold(bits: int) -> int:
    return bits ^ bits >> 32


def of_rows(x: np.ndarray, first: int, step: int, b: np.ndarray) -> int:
    """The definition, for the first columns of a matrix."""
    a = [splitmix64(first + i * step, 0x9E3779B97F4A7C15) | 1 for i in range(len(x))]
    return sum(fold(int(x[i, j])) * a[i] * int(weight) for i in range(len(x)) for j, weight in enumerate(b)) & MASK


def compilations(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Let kernels be compiled anew, and count it by width. Threads that an earlier test has left may compile some, too."""
    compiled, plain = Counter[int](), digests._compiled.__wrapped__

    @cache
    def counted(width: int) -> digests._Kernels:
        compiled[width] += 1
        return plain(width)

    monkeypatch.setattr(digests, "_compiled", counted)
    return compiled

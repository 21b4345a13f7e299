"""The hashes by which tests and benchmarks compare the tensors of servers."""

import pytest
import torch

from tests.support.raw_mode.resharder_tensor_hashes import hash_of
from tests.support.tensor_hashes import differing


def test_a_hash_sees_values_places_dtypes_shapes_and_strides() -> None:
    plain = torch.arange(4096, dtype=torch.float32).view(64, 64)
    assert hash_of(plain) == hash_of(plain.clone())
    swapped, changed = plain.clone(), plain.clone()
    swapped[[3, 5]] = swapped[[5, 3]]
    changed.view(torch.int32)[7, 7] ^= 1
    others = [swapped, changed, plain.view(32, 128), plain.view(torch.int32), plain.T, plain[:, :63]]
    assert len({hash_of(each) for each in [plain, *others]}) == 7


@pytest.mark.parametrize("size", [0, 1, 3, 9])
def test_a_hash_sees_every_byte_of_a_tensor_of_any_size(size: int) -> None:
    plain = torch.zeros(size, dtype=torch.uint8)
    assert len({hash_of(plain), *(hash_of(plain.index_fill(0, torch.tensor([i]), 1)) for i in range(size))}) == size + 1


def test_a_tensor_differs_if_one_side_alone_has_it() -> None:
    assert differing([{"a": "1", "b": "2"}], [{"a": "1", "c": "2"}]) == ["b", "c"]
    with pytest.raises(ValueError, match="expected 2 workers, got 1"):
        differing([{}], [{}, {}])

"""Frames made by hand are the protobuf message, and what is no message is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resharder.converters.wire.chunk_frame import ChunkHeader, frame, unframe
from resharder.v1 import publisher_pb2

u64, u32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
headers = st.builds(ChunkHeader, u64, u64, u32, u32, u64)


@given(headers, st.binary(max_size=300), st.sampled_from(["", "policy"]))
def test_a_frame_is_the_protobuf_message(header: ChunkHeader, data: bytes, model: str) -> None:
    message = frame(header, data, model)
    chunk = publisher_pb2.Chunk.FromString(message)
    assert ChunkHeader(chunk.version, chunk.epoch, chunk.rank, chunk.index, chunk.checksum) == header
    assert (chunk.data, chunk.model) == (data, model)
    found, content, found_model = unframe(message)
    assert (found, bytes(content), found_model) == (header, data, model)


@given(headers, st.binary(max_size=300))
def test_a_message_made_by_protobuf_is_read_as_well(header: ChunkHeader, data: bytes) -> None:
    message = publisher_pb2.Chunk(**header._asdict(), data=data).SerializeToString()
    found, content, _ = unframe(message)
    assert (found, bytes(content)) == (header, data)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_read_as_protobuf_reads_them_or_refused(message: bytes) -> None:
    try:
        expected = publisher_pb2.Chunk.FromString(message)
    except Exception:
        with pytest.raises(ValueError, match="expected a Chunk"):
            unframe(message)
        return
    header, data, model = unframe(message)
    assert (header.version, header.index, bytes(data), model) == (expected.version, expected.index, expected.data, expected.model)


def test_a_frame_cut_short_is_refused() -> None:
    message = frame(ChunkHeader(1, 2, 3, 4, 5), b"x" * 1000)
    with pytest.raises(ValueError, match="expected a Chunk"):
        unframe(message[:-1])

"""Digests by shares: small boxes together, large ones in parts, by any number of threads."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from resharder.converters.geometry.layout import Box, Range, TensorSpec, box_index, full_box
from resharder.converters.storage.digest import digest
from resharder.converters.storage.files import MappedFiles, parse_header
from resharder.server.store import digests
from resharder.server.store.digests import TensorBox, digest_boxes, digest_tensors
from safetensors.numpy import save_file

SPECS = {
    "experts": TensorSpec("experts", "F16", (6, 40, 24)),
    "head": TensorSpec("head", "F32", (90, 33)),
    "norm": TensorSpec("norm", "F16", (130,)),
    "scale": TensorSpec("scale", "F32", ()),
    "empty": TensorSpec("empty", "F16", (0, 4)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digesting")
    random = np.random.default_rng(0)
    kinds = {"F16": np.float16, "F32": np.float32}
    save_file({s.name: np.array(random.normal(size=s.shape), kinds[s.dtype]) for s in SPECS.values()}, path / "a.safetensors")
    return path


def mapped(folder: Path) -> MappedFiles:
    path = folder / "a.safetensors"
    start = path.read_bytes()
    return MappedFiles(folder, [parse_header(path.name, start[: 8 + int.from_bytes(start[:8], "little")], len(start))])


@st.composite
def boxes(draw: st.DrawFn) -> list[TensorBox]:
    found = []
    for name in draw(st.lists(st.sampled_from(sorted(SPECS)), max_size=12)):
        box: list[Range] = []
        for n in SPECS[name].shape:
            start = draw(st.integers(0, max(0, n - 1)))
            step = draw(st.integers(1, 3))
            most = -(-(n - start) // step) if n else 0
            count = draw(st.integers(1, most)) if most else 0
            box.append(Range(start, count, step if count > 1 else 1))
        found.append(TensorBox(SPECS[name], tuple(box)))
    return found


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=boxes(),
    share=st.sampled_from([2, 100, 3000, 1 << 20]),
    read=st.sampled_from([2, 64, 1000, 1 << 20]),
    threads=st.sampled_from([1, 3]),
    small_pages=st.booleans(),
)
def test_shares_add_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[TensorBox], share: int, read: int, threads: int, small_pages: bool
) -> None:
    monkeypatch.setattr(digests, "_SHARE_BYTES", share)
    monkeypatch.setattr(digests, "_READ_BYTES", read)
    monkeypatch.setattr(digests, "_FORGET_BYTES", 1)
    with mapped(folder) as files:
        files.small_pages = small_pages
        found = digest_boxes(files, asked, threads)
        assert found == [alone(files, spec, box) for spec, box in asked]
        assert len(files.arrays) == len(SPECS)


def alone(files: MappedFiles, spec: TensorSpec, box: Box) -> int:
    array = files.arrays[spec.name]
    return digest(array[box_index(box)] if box else array, box, spec.shape)


@pytest.mark.parametrize("small_pages", [True, False])
def test_a_changed_byte_changes_its_tensor_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, small_pages: bool) -> None:
    monkeypatch.setattr(digests, "_SHARE_BYTES", 1000)
    with mapped(folder) as files:
        files.small_pages = small_pages
        before = digest_tensors(files, 2)
        assert before == {name: alone(files, spec, full_box(spec.shape)) for name, spec in files.specs.items()}
        path, begin = files.places["head"]
        with path.open("r+b") as file:
            file.seek(begin + (89 * 33 + 32) * 4)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
        after = digest_tensors(files, 2)
    assert {name for name in before if before[name] != after[name]} == {"head"}


def test_a_file_that_was_cut_short_is_no_digest(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    with mapped(tmp_path) as files:
        assert files.small_pages
        os.truncate(tmp_path / "a.safetensors", 200)
        with pytest.raises(OSError, match="the file ends after"):
            digest_tensors(files, 2)

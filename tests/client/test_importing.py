"""Checkpoints that become versions: Hugging Face's, and those that real Megatron ranks have saved."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fakepg, tiny_hf

# isort: split
from resharder.client.errors import Conflict, StaleEpoch, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import Version
from resharder.client.tools.import_checkpoint import import_checkpoint
from resharder.client.trainer.connect import connect
from resharder.converters.errors import ConversionError, LayoutError, UnknownTensor
from resharder.converters.models.megatron.torch_dist import open_torch_dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata

from tests.client.models import equal, exported
from tests.support.daemon import Daemon
from tests.support.observing import wait_until
from tests.support.ranks import forked
from tests.support.weights import random_weights

pytestmark = pytest.mark.compat("import")

Tensors = dict[str, torch.Tensor]
CASES: dict[str, dict[str, Any]] = {
    "dense": {
        "family": "qwen3_tied",
        "layout": {"tp": 2, "pp": 2, "vocab_multiple": 128},
        "form": {},
        "dtype": "bfloat16",
    },
    "experts": {
        "family": "qwen3_moe",
        "layout": {"tp": 2, "ep": 2, "spec": "te"},
        "form": {"singleton_local_shards": True},
        "dtype": "float32",
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what four ranks saved of each case, and the Hugging Face checkpoints of their families."""
    folder = tmp_path_factory.mktemp("saved")
    for case in CASES.values():
        tiny_hf.save_checkpoint(folder / case["family"], tiny_hf.tiny_config(case["family"]))
    (folder / "cases.json").write_text(json.dumps(CASES))
    forked("tests.client.save_ranks", folder)
    return folder


@pytest.fixture(autouse=True)
def _alone() -> None:
    fakepg.leave()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tiny_hf.save_checkpoint(tmp_path / "checkpoint", tiny_hf.tiny_config("qwen3_tied"))
    split(folder)
    return folder


def split(folder: Path) -> None:
    """Into two files with an index."""
    full = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = {"model-1-of-2.safetensors": sorted(full)[::2], "model-2-of-2.safetensors": sorted(full)[1::2]}
    for file, names in halves.items():
        save_file({name: full[name] for name in names}, folder / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder: Path, act: Callable[[Tensors], object]) -> None:
    path = folder / "model-2-of-2.safetensors"
    full = load_file(path)
    act(full)
    save_file(full, path)


def test_a_folder_comes_out_as_it_went_in(daemon: Daemon, checkpoint: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    version = import_checkpoint(daemon.endpoint, checkpoint, "folder", step=7, progress=lambda *counts: reports.append(counts))
    assert (version.state, version.step) == (Version.State.READY, 7)
    assert version.job.startswith("import-checkpoint-")
    full = tiny_hf.load_checkpoint(checkpoint)
    assert equal(exported(daemon.endpoint, version.name, tmp_path / "out"), full)
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads((checkpoint / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (checkpoint / name).read_bytes()
    assert reports[-1] == (version.size_bytes - overhead(tmp_path / "out"),) * 2


def overhead(folder: Path) -> int:
    """Bytes of safetensors files that are no tensor's."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_what_ranks_of_any_layout_saved_is_imported_to_the_bit(daemon: Daemon, saved: Path, case: str, tmp_path: Path) -> None:
    source = saved / CASES[case]["family"]
    version = import_checkpoint(daemon.endpoint, saved / case, case, config=source)
    dtype = getattr(torch, CASES[case]["dtype"])
    full = {name: tensor.to(dtype) for name, tensor in tiny_hf.load_checkpoint(source).items()}
    assert equal(exported(daemon.endpoint, version.name, tmp_path / "out"), full)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_a_live_trainer_is_fenced_only_when_that_is_asked_for(daemon: Daemon, checkpoint: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_tied")
    with connect(daemon.endpoint, model="trained", job="trainer", config=config) as publisher:
        publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(60)
        with pytest.raises(Conflict, match="of job trainer is alive, 1 of 1 ranks: an import would fence that trainer"):
            import_checkpoint(daemon.endpoint, checkpoint, "trained")
        publisher.publish_tensors(2, random_weights(config, 2).items()).wait_ready(60)
        assert import_checkpoint(daemon.endpoint, checkpoint, "trained", take_over=True).number == 3
        with pytest.raises(StaleEpoch):
            publisher.publish_tensors(3, random_weights(config, 3).items())
    assert import_checkpoint(daemon.endpoint, checkpoint, "trained").number == 4, "an earlier import is nobody's trainer"


@pytest.mark.full
def test_a_trainer_that_is_gone_for_a_lease_is_in_nobodys_way(checkpoint: Path) -> None:
    config = tiny_hf.tiny_config("qwen3_tied")
    with Daemon(lease_seconds=8) as daemon, Operator(daemon.endpoint) as operator:
        with connect(daemon.endpoint, model="trained", job="trainer", config=config) as publisher:
            publisher.publish_tensors(1, random_weights(config, 1).items()).wait_ready(60)
            wait_until(lambda: [known.live_ranks for known in operator.daemon().publishers] == [1], "a live rank")
        wait_until(lambda: [known.live_ranks for known in operator.daemon().publishers] == [0], "no live rank")
        assert import_checkpoint(daemon.endpoint, checkpoint, "trained").number == 2


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (lambda full: full.pop("model.norm.weight"), UnknownTensor, r"1 missing \['model.norm.weight'\] and 0 unexpected"),
        (lambda full: full.update(extra=torch.zeros(1)), UnknownTensor, r"0 missing \[\] and 1 unexpected \['extra'\]"),
        (lambda full: full.update({"model.norm.weight": torch.zeros(64)}), LayoutError, r"expected \[128\] .* found \[64\]"),
    ],
)
def test_a_folder_that_is_not_what_its_config_says_is_refused(
    daemon: Daemon, checkpoint: Path, harm: Callable[[Tensors], object], error: type[Exception], message: str
) -> None:
    if "model.norm.weight" not in load_file(checkpoint / "model-2-of-2.safetensors"):
        pytest.fail("expected the tensor in the second file")
    change(checkpoint, harm)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"model.norm.weight": "model-2-of-2.safetensors", ', ""))
    with pytest.raises(error, match=message):
        import_checkpoint(daemon.endpoint, checkpoint, "refused")


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_megatron_checkpoint_of_another_model_is_refused(daemon: Daemon, saved: Path, tmp_path: Path) -> None:
    def refuse(error: type[Exception], message: str, folder: Path = saved / "dense", **changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(tiny_hf.tiny_config("qwen3_tied", **changes)))
        with pytest.raises(error, match=message):
            import_checkpoint(daemon.endpoint, folder, "refused", config=tmp_path)

    refuse(UnknownTensor, r"expected the model's \d+ tensors, found 1 missing \(output_layer.weight\)", tie_word_embeddings=False)
    refuse(
        LayoutError, r"linear_fc1.weight: expected \[4, 400, 128\] from the config, found \[4, 384, 128\]", intermediate_size=200
    )
    refuse(LayoutError, r"expected \[5, .* from the config, found \[4, ", num_hidden_layers=5)
    refuse(LayoutError, r"word_embeddings.weight: expected \[2048, 128\] from the config, found \[1024, 128\]", vocab_size=1100)
    refuse(UnknownTensor, r"2 unexpected \(.*k_layernorm.weight, .*q_layernorm.weight\)", model_type="llama")
    with pytest.raises(UsageError, match=r"the Megatron checkpoint .* has no config of the model"):
        import_checkpoint(daemon.endpoint, saved / "dense", "refused")
    cut = Path(shutil.copytree(saved / "dense", tmp_path / "cut"))
    for path in (cut / "iter_0000005").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    refuse(ConversionError, "cannot be read", cut)
    (cut / "iter_0000005/.metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "done")))
    refuse(ConversionError, "expected a description of tensors, found posix.mkdir", cut)
    assert not (tmp_path / "done").exists()
    (cut / "latest_checkpointed_iteration.txt").write_text("6")
    refuse(UsageError, "iter_0000006, which .* names, is not a torch_dist checkpoint: it has no metadata.json", cut)


@pytest.mark.parametrize("missing", ["offsets", "sizes"])
def test_a_megatron_checkpoint_with_incomplete_chunks_is_refused(tmp_path: Path, missing: str) -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4]), [chunk])
    delattr(chunk, missing)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"weight": entry}, storage_data={})))
    with (
        pytest.raises(ConversionError, match="weight: expected a size, a dtype and chunks within the size"),
        open_torch_dist(tmp_path, tiny_hf.tiny_config("llama")),
    ):
        pass


def test_what_is_no_checkpoint_is_refused_by_what_was_expected(daemon: Daemon, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a folder with a checkpoint"):
        import_checkpoint(daemon.endpoint, tmp_path / "none", "refused")
    with pytest.raises(UsageError, match=r"cannot read the config at"):
        import_checkpoint(daemon.endpoint, tmp_path, "refused")
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf.tiny_config("qwen3_tied")))
    with pytest.raises(UsageError, match="has no safetensors file"):
        import_checkpoint(daemon.endpoint, tmp_path, "refused")

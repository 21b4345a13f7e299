"""The config.json that an engine was started with, compared with a version's; read against SGLang 0.5.17 and 0.5.23."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from resharder.client.inference.engine import InstallError
from resharder.converters.hf_config import Difference, differences

_LENGTHS = frozenset(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"))
_DRAFTS = frozenset(("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "n_predict"))


class EngineConfig:
    """Content of an engine's config.json at the start of the engine.

    Args:
        folder: Folder of the model.
        overrides: Content of `--json-model-override-args`, which replaces values of both files.
        context_length: `--context-length`; None if it is not set.
    """

    def __init__(self, folder: str, overrides: str, context_length: int | None) -> None:
        self._content = _read(folder)
        self._overrides: dict[str, Any] = json.loads(overrides or "{}")
        self._ignored = _DRAFTS | (_LENGTHS if context_length is not None else frozenset())

    def differences(self, version: bytes) -> list[Difference]:
        """Return the values that differ between the engine's config.json, first, and a version's.

        Args:
            version: Content of the version's config.json; empty if it is not known, so that nothing differs.

        Raises:
            InstallError: The version's config is not JSON.
        """
        if not version or not self._content:
            return []
        try:
            theirs = json.loads(version)
        except ValueError as error:
            raise InstallError(f"the version's config.json cannot be read: {error}") from error
        found = differences({**self._content, **self._overrides}, {**theirs, **self._overrides})
        return [each for each in found if each.name.rpartition(".")[2] not in self._ignored]


def _read(folder: str) -> Mapping[str, Any]:
    """Return the content of a folder's config.json; empty if there is none, as for the name of a model on the Hub."""
    try:
        found = json.loads(Path(folder, "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}

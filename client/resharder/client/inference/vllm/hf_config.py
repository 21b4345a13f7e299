"""The config.json that an engine was started with, compared with a version's; read against vLLM 0.26, 0.28 and 0.32.

Both files go through vLLM's own parser, with the server's overrides. vLLM's `hf_config` cannot be compared with a file: vLLM and
its models write into it after they have read the file (`rope_parameters["rope_type"]` of DeepSeek, all of a drafter's).
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import vllm
from resharder.client.inference.engine import InstallError
from resharder.client.inference.vllm.drafters import drafts_with_weights
from resharder.converters.hf_config import Difference, differences
from vllm.transformers_utils.config import get_config

_CONFIG = "config.json"
_LENGTHS = frozenset(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length"))
_WINDOWS = frozenset(("sliding_window", "use_sliding_window", "max_window_layers"))
_DRAFTS = frozenset(("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "n_predict"))
OVERRIDES: Mapping[str, str] = {
    "--hf-overrides": "what it sets, in the version's config as in the server's",
    "--max-model-len": ", ".join(sorted(_LENGTHS)),
    "--disable-sliding-window": ", ".join(sorted(_WINDOWS)),
    "no --speculative-config": ", ".join(sorted(_DRAFTS)),
    "--dtype": "dtype, which is never compared",
    "--generation-config": "generation_config.json, which is never compared",
}
"""Options of a server that set a value in place of config.json's, and the values. A server is not refused for them."""
_SOURCES = ("config", "model_executor", "transformers_utils", "v1")


class EngineConfig:
    """Content of an engine's config.json at the start of the engine.

    Args:
        vllm_config: vLLM's `VllmConfig`, before vLLM has loaded the model.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._config, self._drafts = vllm_config.model_config, drafts_with_weights(vllm_config.speculative_config)
        self._content = _read(self._config)
        self._made = {} if self._content else self._config.hf_config.to_dict()  # a folder that this host does not have
        self._compared: tuple[bytes, list[Difference]] = b"", []

    def differences(self, version: bytes) -> list[Difference]:
        """Return the values that differ between the engine's config.json, first, and a version's.

        Args:
            version: Content of the version's config.json; empty if it is not known, so that nothing differs.

        Raises:
            InstallError: This vLLM cannot read the version's config.
        """
        if version != self._compared[0]:
            self._compared = version, self._compare(version)
        return self._compared[1]

    def _compare(self, content: bytes) -> list[Difference]:
        try:
            version = json.loads(content)
            if not differences(self._content, version):
                return []
            theirs = self._parsed(version)
        except Exception as error:
            raise InstallError(f"vLLM {vllm.__version__} cannot read the version's config.json: {error}") from error
        ours = self._parsed(self._content) if self._content else self._made
        found = differences(ours, theirs)
        return [each for each in found if not self._is_overridden(each.name, theirs) and self._is_read(each)]

    def _parsed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a server that starts now would take from a config.json.

        vLLM sets a variable of the environment for some quantisation configs, so it does not get them.
        """
        overrides = self._config.hf_overrides
        values = overrides if isinstance(overrides, dict) else {}
        nested = {name: value for name, value in values.items() if isinstance(value, dict)}
        plain = {name: value for name, value in content.items() if name != "quantization_config"}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, _CONFIG).write_text(json.dumps(plain))
            for code in Path(self._folder).glob("*.py"):  # of configs that transformers reads with code of the checkpoint's own
                Path(folder, code.name).symlink_to(code.absolute())
            parsed = get_config(
                folder,
                self._config.trust_remote_code,
                config_format="hf",
                hf_overrides_kw={name: value for name, value in values.items() if name not in nested},
                hf_overrides_fn=overrides if callable(overrides) else None,
            )
            if nested:
                self._config._apply_dict_overrides(parsed, nested)
        return {**parsed.to_dict(), "quantization_config": content.get("quantization_config")}

    @property
    def _folder(self) -> str:
        return str(getattr(self._config, "hf_config_path", None) or self._config.model)

    def _is_overridden(self, name: str, theirs: Mapping[str, Any]) -> bool:
        """Return whether an option of this server sets a value, one of `OVERRIDES`."""
        last = name.rpartition(".")[2]
        if last in _LENGTHS:
            dynamic = "dynamic" in json.dumps(theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}, default=str)
            return getattr(self._config, "original_max_model_len", None) is not None and not dynamic
        if last in _WINDOWS:
            return bool(getattr(self._config, "disable_sliding_window", False))
        return last in _DRAFTS and not self._drafts

    def _is_read(self, difference: Difference) -> bool:
        """Return whether any code reads a value that only one of the two has; tools write others into a config.json."""
        if difference.first is not None and difference.second is not None:
            return True
        if self._config.trust_remote_code:
            return True
        return _is_read(difference.name.rpartition(".")[2], type(self._config.hf_config).__module__)


def _read(model_config: Any) -> dict[str, Any]:
    """Return the content of the engine's config.json; empty if there is none here."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    path = getattr(model_config, "hf_config_path", None) or model_config.model
    try:
        found: dict[str, Any] | None = get_hf_file_to_dict(_CONFIG, path, model_config.revision)
    except Exception:
        return {}
    return found or {}


@cache
def _is_read(name: str, config_module: str) -> bool:
    """Return whether vLLM, or transformers' code of a model, has a name in its source."""
    package, pattern = Path(str(vllm.__file__)).parent, re.compile(rf"\b{re.escape(name)}\b".encode())
    folders = [package / folder for folder in _SOURCES]
    if file := getattr(sys.modules.get(config_module), "__file__", None):
        folders.append(Path(file).parent)
    files = (Path(root, name) for folder in folders for root, _, names in os.walk(folder) for name in names)
    return any(pattern.search(file.read_bytes()) for file in files if file.suffix == ".py")

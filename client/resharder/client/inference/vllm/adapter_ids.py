"""How vLLM names a version of an adapter: a `LoRARequest` with a name, an id and a path of its own.

vLLM's prefix cache is keyed by the name (`_gen_lora_extra_hash_keys`, `v1/core/kv_cache_utils.py`; since 0.32 by name and
path), and its slots by the id. There is nothing at the path: the workers have loaded the version before any request names it.
"""

from typing import Any

from resharder.client.inference.worker.adapter_agent import IDS, adapter_id

_PATH = "resharder:"


def request_of(adapter: str, id: int, version: int) -> Any:
    """Return the `LoRARequest` of a version of an adapter."""
    from vllm.lora.request import LoRARequest

    name = f"{adapter}@{version}"
    return LoRARequest(lora_name=name, lora_int_id=id, lora_path=_PATH + name)


def renewed(request: Any, version: int) -> Any:
    """Return the `LoRARequest` of another version of the adapter of `request`; `request` itself if it is of that version."""
    if version in (0, version_of(request)):
        return request
    return request_of(adapter_of(request), adapter_id(request.lora_int_id // IDS - 1, version), version)


def is_ours(request: Any) -> bool:
    """Return whether a `LoRARequest` or None is of `request_of`."""
    return request is not None and str(request.lora_path).startswith(_PATH)


def adapter_of(request: Any) -> str:
    """Return the model of the adapter of a `LoRARequest` of `request_of`."""
    return str(request.lora_name).rpartition("@")[0]


def version_of(request: Any) -> int:
    """Return the number of the version of a `LoRARequest` of `request_of`."""
    return int(request.lora_name.rpartition("@")[2])

"""Slots of vLLM's LoRA manager in a worker, as `engine.AdapterSlots`; read against 0.28, 0.31 and 0.32.

vLLM has tensors with a slot for each of `--max-loras` adapters (`lora_a_stacked`, `lora_b_stacked`; `lora/layers`), and looks the
slot of a request's adapter up by its id before each step. A slot that no request names can be written at any time, so the thread
that stages an adapter has vLLM's own code write it while the engine computes, and reads it back. The engine's thread only enters
the id: `reserve` before, `enter` after.

Both of vLLM's caches, of slots and of adapters on the host, evict what was used least recently, and vLLM loads an evicted adapter
again from its path. An adapter of ours has no path, so its id is pinned in both.
"""

import math
import re
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from resharder.client.inference.engine import AdapterTensors, InstallError
from resharder.client.inference.vllm.adapter_ids import adapter_of, is_ours, renewed

_PATTERNS = ("rank_pattern", "alpha_pattern")


class LoraSlots:
    """The slots of one worker.

    Args:
        manager: vLLM's `WorkerLoRAManager` (`lora/worker_manager.py`).
        pipelined: Whether the model's layers are divided among stages, so that a worker lacks modules of an adapter.
        requests: The worker's state of each request, by id.
    """

    def __init__(self, manager: Any, pipelined: bool, requests: Mapping[str, Any]) -> None:
        self._worker_manager, self._manager, self._pipelined = manager, manager._adapter_manager, pipelined
        self._requests, self._device_type = requests, torch.device(manager.device).type

    @classmethod
    def of_worker(cls, worker: Any) -> "LoraSlots":
        """Return the slots of one of vLLM's workers.

        Raises:
            InstallError: vLLM was started without `--enable-lora`.
        """
        manager = getattr(worker.model_runner, "lora_manager", None)
        if manager is None:
            raise InstallError("this server takes no adapters: start vLLM with --enable-lora")
        requests = getattr(worker.model_runner, "requests", {})  # the newer runner gets preempted requests as new ones
        return cls(manager, worker.vllm_config.parallel_config.pipeline_parallel_size > 1, requests)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the slots."""
        found: torch.dtype = self._manager.lora_config.lora_dtype
        return found

    @property
    def ids(self) -> list[int | None]:
        """The id of the adapter in each slot."""
        found: list[int | None] = self._manager.lora_index_to_id
        return found

    def whole(self) -> bool:
        """Whether this worker has every element of an adapter: no tensor, expert or pipeline parallelism."""
        modules = self._manager.modules.values()
        divided = any(getattr(module, "tp_size", 1) > 1 or getattr(module, "use_ep", False) for module in modules)
        return not self._pipelined and not divided

    def check(self, config: Mapping[str, Any], names: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `InstallError` if this engine would refuse an adapter, or ignore a part of it.

        Args:
            config: Content of its adapter_config.json.
            names: Shape of each tensor, by PEFT's name.
        """
        if (kind := config.get("peft_type", "LORA")) != "LORA":
            raise InstallError(f"expected an adapter of LoRA, got {kind}")
        if config.get("use_dora"):
            raise InstallError("vLLM has no DoRA: train the adapter with use_dora=False")
        limit = int(self._manager.lora_config.max_lora_rank)
        rank = max([config["r"], *(config.get("rank_pattern") or {}).values()])
        if rank > limit:
            raise InstallError(
                f"the adapter has rank {rank}, and this server takes {limit}: start vLLM with --max-lora-rank {rank}"
            )
        try:
            self._helper(config).validate_legal(self._manager.lora_config)
        except ValueError as error:
            raise InstallError(f"vLLM does not take this adapter: {error}") from error
        mapper = self._mapper()
        modules = {_parsed(name, mapper) for name in names}
        known = {*self._manager.modules, *(part for parts in self._manager.packed_modules.values() for part in parts)}
        known |= {f"{module}.base_layer" for module in self._manager.modules}  # PEFT's name of an expert layer's gate and up
        unknown = sorted(module for module in modules if module not in known)
        if unknown and not self._pipelined:
            raise InstallError(
                f"this server has no adapters for {len(unknown)} modules of the adapter, and would serve it without them: "
                f"{', '.join(unknown[:4])}{', …' if len(unknown) > 4 else ''}. Train it with other target_modules, or start vLLM "
                "without --lora-target-modules"
            )

    def reserve(self, id: int) -> int | None:
        """Give a slot to an adapter, and return the slot's number; None if no slot is free. Called on the engine's thread."""
        manager = self._manager
        slots = range(len(self.ids) - unused_slots(self._device_type))
        slot = next((slot for slot in slots if self.ids[slot] is None), None)
        if slot is None:
            return None
        self.ids[slot] = id
        manager._active_adapters[id] = None
        manager._active_adapters.pin(id)
        return slot

    def full(self) -> str:
        """Return why no slot is free, and what to do."""
        usable = len(self.ids) - unused_slots(self._device_type)
        return (
            f"all {usable} slots for adapters are in use, and a new version needs one beside its predecessor's: start "
            f"vLLM with --max-loras {len(self.ids) + 1}, or wait until the requests of older versions have ended"
        )

    def write(self, slot: int, id: int, tensors: AdapterTensors, config: Mapping[str, Any]) -> Any:
        """Have vLLM pack an adapter and write it into its slot. Called on any thread; nothing reads the slot.

        Returns:
            vLLM's own adapter, for `enter`.

        Raises:
            InstallError: vLLM refuses the adapter.
        """
        manager = self._manager
        try:
            adapter = self._worker_manager._lora_model_cls.from_lora_tensors(
                lora_model_id=id,
                tensors=self._local(tensors),
                peft_helper=self._helper(config),
                device=str(next(iter(tensors.values())).device),  # not of the host, which vLLM would pin tensor by tensor
                dtype=self.dtype,
                model_vocab_size=self._worker_manager.vocab_size,
                weights_mapper=self._mapper(),
                skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
            )
            adapter.is_3d_lora_weight = _is_3d(tensors)
            if adapter.loras:
                if hasattr(manager, "_validate_moe_lora_format"):  # since 0.32
                    manager._validate_moe_lora_format(adapter)
                manager._create_merged_loras_inplace(adapter)
            for name, module in manager.modules.items():
                found = manager._get_lora_layer_weights(adapter, name)
                if found:
                    module.set_lora(slot, found.lora_a, found.lora_b)
                else:
                    module.reset_lora(slot)
        except (ValueError, RuntimeError, AssertionError, KeyError) as error:
            raise InstallError(f"vLLM cannot load the adapter: {type(error).__name__}: {error}") from error
        adapter.loras.clear()  # the slot has the weights, and keeps them
        return adapter

    def read(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the part of each of vLLM's stacked tensors that belongs to a slot, by the path of the tensor."""
        found: dict[str, torch.Tensor] = {}
        seen: set[tuple[int, int]] = set()
        for path, module in self._manager.modules.items():
            for name, value in vars(module).items():
                if not name.endswith("_stacked"):
                    continue
                for i, tensor in enumerate(value if isinstance(value, list | tuple) else [value]):
                    if not isinstance(tensor, torch.Tensor) or tensor.shape[0] != len(self.ids) or tensor.dim() < 3:
                        continue  # views of one expert
                    memory = tensor.data_ptr(), tensor.numel()
                    if memory not in seen:
                        seen.add(memory)
                        found[f"{path}.{name}[{i}]"] = tensor[slot]
        return found

    def holds(self, slot: int, id: int) -> bool:
        """Return whether a slot is that of an adapter's id."""
        return self.ids[slot] == id

    def marks(self, slot: int) -> dict[str, torch.Tensor]:
        """Return the elements that vLLM keeps for a slot beside the stacked tensors, each as a matrix, by name.

        Layers of experts have one: `adapter_enabled`, which `set_lora` and `reset_lora` write.
        """
        modules = self._manager.modules.items()
        return {
            f"{path}.adapter_enabled": module.adapter_enabled[slot : slot + 1].view(1, 1)
            for path, module in modules
            if hasattr(module, "adapter_enabled")
        }

    def renamed(self, adapter: Any, id: int) -> Any:
        """Return vLLM's adapter, whose slot has the weights, under another id."""
        found = copy(adapter)
        found.id = id
        return found

    def enter(self, id: int, adapter: Any) -> None:
        """Make requests for `id` find their slot, which is reserved and written. Called on the engine's thread."""
        manager = self._manager
        if id not in manager._registered_adapters:
            manager._registered_adapters[id] = adapter
            manager._registered_adapters.pin(id)
        manager._last_mapping = None  # 0.28 compares the mapping of the last step alone, not the slots

    def renew(self, adapter: str, version: int) -> None:
        """Name another version of an adapter in its requests, which the engine has preempted. Called on the engine's thread."""
        for request in self._requests.values():
            lora = request.lora_request
            if is_ours(lora) and adapter_of(lora) == adapter:
                request.lora_request = renewed(lora, version)

    def release(self, id: int) -> None:
        """Free the slot of an adapter that no request uses any more. Called on the engine's thread."""
        self._manager.remove_adapter(id)  # also takes it from the slots, pinned or not
        self._manager.deactivate_adapter(id)
        self._manager._last_mapping = None

    def scaling(self, config: Mapping[str, Any], name: str) -> float:
        """Return the factor by which vLLM multiplies a tensor: 1 for A, that of PEFT for B."""
        if ".lora_A." in name or name.endswith("lora_embedding_A"):
            return 1.0
        module = _module_of(name)
        rank = _match(config.get("rank_pattern"), module, config["r"])
        alpha = _match(config.get("alpha_pattern"), module, config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))

    def unscaled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config of an adapter of the same shape whose tensors vLLM does not scale."""
        ranks = config.get("rank_pattern") or {}
        return {**config, "use_rslora": False, "lora_alpha": config["r"], "alpha_pattern": ranks}

    def _helper(self, config: Mapping[str, Any]) -> Any:
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper.from_dict({**config, "vllm_max_position_embeddings": self._worker_manager.max_position_embeddings})
        if not hasattr(helper, "get_rank_and_scaling") and any(config.get(pattern) for pattern in _PATTERNS):
            raise InstallError(
                "this release of vLLM scales all modules of an adapter alike, and the adapter has rank_pattern or alpha_pattern: "
                "use a newer vLLM, or train it without them"
            )
        return helper

    def _mapper(self) -> Any:
        """Return vLLM's mapping of a checkpoint's module names, without those that pack several into one."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        for method in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.32; since 0.28
            if hasattr(mapper, method):
                return getattr(mapper, method)()
        return mapper

    def _local(self, tensors: AdapterTensors) -> dict[str, torch.Tensor]:
        """Return the tensors without those of experts of other ranks, as vLLM does while it reads a file."""
        found, spec = dict(tensors), self._manager.moe_ep_load_spec
        if spec is None:
            return found
        from vllm.lora.lora_model import _is_remote_expert_key

        return {name: tensor for name, tensor in found.items() if not _is_remote_expert_key(name, spec)}


def unused_slots(device_type: str) -> int:
    """Return how many slots take no adapter on a type of device, such as "cuda".

    On CPUs the last slot stays empty: vLLM gives a token without an adapter the index -1, and its CPU kernels, which index by it
    (`lora/ops/torch_ops`), compute the token with the adapter in that slot (vllm-project/vllm#48421, open at 0.33).
    """
    return 1 if device_type == "cpu" else 0


def _parsed(name: str, mapper: Any) -> str:
    """Return vLLM's name of the module of a tensor."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    return str(parse_fine_tuned_lora_name(name, mapper)[0])


def _is_3d(tensors: AdapterTensors) -> bool:
    """Return whether an adapter has one tensor for all experts of a layer, as PEFT's `target_parameters` gives."""
    return any(re.search(r"\.experts(\.base_layer)?\.lora_[AB]\.", name) for name in tensors)


def _module_of(name: str) -> str:
    """Return the module of PEFT's name of a tensor, as PEFT's patterns match it."""
    module = re.sub(r"(\.lora_[AB]\.weight|\.lora_embedding_[AB])$", "", name.removeprefix("base_model.model."))
    if module.endswith(".experts.base_layer"):
        return module.removesuffix(".base_layer") + ".gate_up_proj"
    return module + ".down_proj" if module.endswith(".experts") else module


def _match(patterns: Any, module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name, as PEFT's `get_pattern_key` does."""
    return next((value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)

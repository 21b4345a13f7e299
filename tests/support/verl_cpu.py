"""CPUs as a platform of verl, by its own registry, so that its FSDP engine runs without GPUs; importing this selects it."""

from types import ModuleType
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

_MODULE = ModuleType("cpu")
vars(_MODULE).update(vars(torch.cpu), empty_cache=lambda: None, memory_allocated=lambda: 0, memory_reserved=lambda: 0)
_MODULE.mem_get_info = lambda: (0, 0)  # type: ignore[attr-defined]


class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """The attributes of a platform that the engine reads."""

    device_name = "cpu"
    vendor_name = "cpu"

    @property
    def device_module(self) -> ModuleType:
        return _MODULE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False


set_platform(PlatformCPU())

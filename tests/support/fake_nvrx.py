"""A stand-in for nvidia-resiliency-ext, of which Megatron-Bridge imports a name; PyPI's wheel is older than it needs."""

import sys
from types import ModuleType
from typing import Any

_inprocess: Any = ModuleType("nvidia_resiliency_ext.inprocess")
_inprocess.CallWrapper = object
sys.modules |= {"nvidia_resiliency_ext": ModuleType("nvidia_resiliency_ext"), _inprocess.__name__: _inprocess}

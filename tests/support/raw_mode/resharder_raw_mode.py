"""A vLLM plugin for tests: linear layers on the CPU stay plain `F.linear`, so that their parameters keep their weights.

As shipped, the CPU build packs them into a kernel's own memory, and comparing parameters there compares nothing.
"""


def register() -> None:
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = plain


def plain(layer, remove_weight):  # type: ignore[no-untyped-def]
    import torch

    layer.cpu_linear = torch.nn.functional.linear

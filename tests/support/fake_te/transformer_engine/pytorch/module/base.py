from ..layers import TransformerEngineBaseModule  # noqa: F401


def get_dummy_wgrad(*args, **kwargs):
    raise NotImplementedError("fused weight gradients")

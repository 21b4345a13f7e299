import torch


class QuantizedTensor(torch.Tensor):
    """What FP8 primary parameters are instances of."""

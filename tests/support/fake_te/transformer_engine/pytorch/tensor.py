import torch


class QuantizedTensor(torch.Tensor):
    """Class of FP8 primary parameters."""

import torch


def gmm(a, b, batch_sizes, trans_b=False):
    """Rows of `a`, `batch_sizes[i]` at a time, times `b[i]`."""
    parts = torch.split(a, batch_sizes.tolist(), 0)
    return torch.cat([part @ (weight.T if trans_b else weight) for part, weight in zip(parts, b, strict=True)], 0)

import torch
import torch.distributed as dist

from . import block_maxima, quantized


def replace_raw_data(tensor, new_raw_data):
    """Move the elements of an FP8 parameter into other memory, as Megatron's DDP does."""
    old = tensor._rowwise_data
    assert (old.dtype, old.shape) == (new_raw_data.dtype, new_raw_data.shape)
    new_raw_data.detach().copy_(old)
    tensor._rowwise_data = new_raw_data


def cast_master_weights_to_fp8(weights, masters, starts, group, **kwargs):
    """Cast this rank's parts of master weights into its elements. Factors are of whole blocks, whose maxima ranks exchange.

    Parts of other ranks are gathered by Megatron's DDP. A rank without a part of a weight has None.
    """
    for weight, master, start in zip(weights, masters, starts, strict=True):
        part = slice(start, start + master.numel()) if master is not None else slice(0)
        whole = torch.zeros(weight.shape)
        if master is not None:
            whole.view(-1)[part] = master.to(weight.dtype).float()
        maxima = block_maxima(whole)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group)
        data, factors = quantized(whole, maxima)
        weight._rowwise_data.view(-1)[part] = data.view(torch.uint8).view(-1)[part]
        weight._rowwise_scale_inv[:, : factors.shape[1]] = factors


def post_all_gather_processing(weights):
    """Make columnwise data of gathered weights. These have none."""

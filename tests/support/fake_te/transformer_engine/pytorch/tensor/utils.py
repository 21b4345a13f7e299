def replace_raw_data(tensor, new_raw_data):
    """Move the elements of an FP8 parameter into other memory, as Megatron's DDP does."""
    old = tensor._rowwise_data
    assert (old.dtype, old.shape) == (new_raw_data.dtype, new_raw_data.shape)
    new_raw_data.detach().copy_(old)
    tensor._rowwise_data = new_raw_data

"""Recording of how a model's `load_weights` places checkpoint tensors, and the inventory of tensors that a model reads."""

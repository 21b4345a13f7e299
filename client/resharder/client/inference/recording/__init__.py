"""Recording how a model's `load_weights` places checkpoint tensors, and listing what a model reads."""

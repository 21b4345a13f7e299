"""Quantised versions: the formats that ranks can cast to, which modules are cast, and the cast in boxes of tensors."""

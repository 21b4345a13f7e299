"""Tensors in files and memory: safetensors layouts, digests, mapped pages."""

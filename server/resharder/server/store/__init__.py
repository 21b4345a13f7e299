"""Versions as folders of safetensors files: layout, file pool, retention, manifests, digests."""

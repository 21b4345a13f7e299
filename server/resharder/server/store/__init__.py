"""Versions as folders of safetensors files: catalogue, life, capacity, pins, retention, manifests, digests."""

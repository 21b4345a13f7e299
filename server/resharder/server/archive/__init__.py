"""Versions in a folder or fsspec URL: written in the background, verified when restored."""

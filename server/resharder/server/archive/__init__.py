"""Versions in a folder or bucket: written in the background, verified when restored."""

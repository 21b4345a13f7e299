"""Versions on a folder or fsspec URL: written behind the daemon, verified on the way back."""

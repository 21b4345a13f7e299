"""Snapshots, metrics and traces of the running daemon."""

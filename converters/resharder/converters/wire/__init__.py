"""Protobuf messages of boxes, layouts and copies, and frames of chunks."""

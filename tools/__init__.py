"""Developers' tools: generated pages and pictures of docs/, fuzzing, mutation tests, checks of prose."""

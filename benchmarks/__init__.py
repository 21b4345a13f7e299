"""Benchmarks behind the figures of README.md."""

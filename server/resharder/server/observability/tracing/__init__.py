"""Traces: ids, spans made of reported timings, and their export."""

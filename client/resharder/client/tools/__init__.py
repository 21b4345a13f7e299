"""Whole jobs behind commands: importing a checkpoint, checking a plan, diagnosing a connection."""

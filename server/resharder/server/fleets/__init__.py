"""Servers and fleets: update strategies, the reconciler of each server, operator commands, canary checks."""

"""Faults put back into a copy of the code, for the simulations to find."""

"""Servers and fleets: sessions of servers, update strategies, the reconciler, operators' commands, canary checks."""

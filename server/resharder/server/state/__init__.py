"""Frozen records and enums of versions, servers and fleets, and the daemon's errors."""

"""Fetch and hold pieces of versions on a host, for the daemon and for nodes."""

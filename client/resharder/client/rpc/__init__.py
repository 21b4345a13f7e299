"""Channels to the daemon, TLS included."""

"""Transports of a rank's bytes to the daemon's store: one interface, `base.Transport`, and one file per transport."""

"""Transports of a rank's boxes to the daemon's store: one interface, `base.Transport`, and one module per transport."""

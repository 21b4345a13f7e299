"""Ways for a rank's bytes into the daemon's store: one interface, `base.Transport`, and one file per way."""

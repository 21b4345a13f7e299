"""Access to checkpoints and versions, in a folder or from the daemon."""

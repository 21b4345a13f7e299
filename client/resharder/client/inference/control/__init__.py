"""The control side: orders from the daemon, the lease, the gate in front of the engine's routes."""

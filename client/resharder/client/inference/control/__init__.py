"""The control side: the server's lease, the daemon's orders, and the gate in front of the engine's routes."""

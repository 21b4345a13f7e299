"""gRPC services. Each method converts a message, makes one call into the daemon's parts, and converts the result."""

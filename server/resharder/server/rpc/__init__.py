"""gRPC services: one message in, one call into the daemon's parts, one message out."""

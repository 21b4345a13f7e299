"""The HTTP port: status page, metrics and probes."""

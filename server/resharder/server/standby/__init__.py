"""Which of several daemons is the one of a registry: terms, leases, and what nodes keep of a registry."""

"""Access control.

    identities.py    names of a caller, from its certificate and token
    roles.py         the table of the configuration: names to roles
    rules.py         the roles that each call needs, and the decision, pure
    resources.py     the model or fleets that a request concerns
    limits.py        rates, open calls and sizes, per caller
    files.py         certificates and tokens, read again when they change
    redaction.py     removal of fields that need a role from answers
    access.py        all parts combined, for gRPC and HTTP
    web.py           the status page's port

Without `security` in the configuration, every client may make every call. Limits apply in either case.
"""

"""Who may do what.

    identities.py    names of a caller, from its certificate and token
    roles.py         the table of the configuration: names to roles
    rules.py         which roles each call wants, and the decision, pure
    resources.py     which model or fleets a request is about
    limits.py        rates, open calls and sizes, per caller
    files.py         certificates and tokens, read again when they change
    answers.py       what an answer keeps from those who may not read weights
    access.py        all of it together, for gRPC and HTTP
    web.py           the page's port
    calling.py       who makes the call that a thread answers, for the journal
    interceptor.py   in front of every call, before anything is read or changed

Without `security` in the configuration everybody who can connect may do everything; the limits hold all the same.
"""

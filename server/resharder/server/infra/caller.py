"""Who makes the call that this thread answers, where there is security: set anew for each call, before anything else sees it."""

from contextvars import ContextVar

CALLER = ContextVar("caller", default="")

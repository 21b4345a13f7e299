"""Who makes the call that this thread answers: for the journal, which says who asked for what."""

from contextvars import ContextVar

CALLER = ContextVar("caller", default="")

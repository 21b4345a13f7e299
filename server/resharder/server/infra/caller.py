"""Identity of the caller of the current call; empty without security. Set before any other code of the call runs."""

from contextvars import ContextVar

CALLER = ContextVar("caller", default="")

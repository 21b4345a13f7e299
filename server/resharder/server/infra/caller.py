"""Caller of the call on the current thread, with security: set for each call before any other code runs."""

from contextvars import ContextVar

CALLER = ContextVar("caller", default="")

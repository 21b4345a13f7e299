"""The plugin's messages between SGLang's tokenizer manager and its schedulers; read against 0.5.17 and 0.5.23.

SGLang decodes messages of types that it knows (`managers/io_struct.py`); `hook_custom_types` adds others.
"""

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class ResharderReqInput(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """A call in every scheduler process of a server."""

    method: str
    """One of `scheduler.CALLS`."""
    args: str = "[]"
    """Its arguments, as JSON."""
    token: str = ""
    """The token of an order (`control/fence.py`), as JSON; empty for other callers."""


class ResharderReqOutput(BaseReq, kw_only=True):  # type: ignore[misc,call-arg]
    """The answers to a call."""

    answers: str
    """The answers of all ranks, or the fence's refusal, as JSON."""


hook_custom_types(ResharderReqInput, ResharderReqOutput)

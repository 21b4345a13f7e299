"""Names of versions on the command line: a number, `latest`, or models/MODEL/versions/NUMBER."""

import re
from collections.abc import Sequence

from resharder.client.errors import NotFound, UsageError
from resharder.client.operator import Operator
from resharder.client.operator.answers import ArchivedVersion, VersionStatus

_NAME = re.compile(r"models/(?P<model>[^/]+)/versions/(?P<number>\d+)")


def named_version(operator: Operator, text: str, model: str = "") -> VersionStatus:
    """Return a version by its name. Raises NotFound, UsageError."""
    if text == "latest":
        return operator.latest(model)
    if found := _NAME.fullmatch(text):
        return operator.version(int(found["number"]), model=found["model"])
    if not text.isdigit():
        raise _not_a_version(text)
    return operator.version(int(text), model=model)


def archived_version(archived: Sequence[ArchivedVersion], text: str) -> ArchivedVersion:
    """Return an archived version by its name. Raises NotFound, and UsageError if several models have it."""
    if not text.startswith("models/") and text != "latest" and not text.isdigit():
        raise _not_a_version(text)
    chosen = [one for one in archived if text in ("latest", one.name, str(one.number))]
    if not chosen:
        found = ", ".join(one.name for one in archived) or "none"
        raise NotFound(f"expected a version that is archived, got {text}: there are {found}")
    if len({one.model for one in chosen}) > 1:
        names = ", ".join(one.name for one in chosen)
        raise UsageError(f"expected one model's version, the archive has {names}: pass --model")
    return max(chosen, key=lambda one: one.number)


def _not_a_version(text: str) -> UsageError:
    return UsageError(f"expected a version's number, `latest` or models/MODEL/versions/NUMBER, got {text!r}")

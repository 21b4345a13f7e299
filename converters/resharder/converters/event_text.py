"""Events as text, for the command and the status page: the versions between which something moved, and other details.

details_text({"from": "1", "to": "2", "strategy": "CANARY"})     "1 → 2, strategy canary"
"""

import json
from collections.abc import Iterator, Mapping


def details_text(details: Mapping[str, str]) -> str:
    """Return the details of an event as part of a sentence: `from` and `to` first, empty values and zeros left out."""
    return ", ".join(_parts(details))


def _parts(details: Mapping[str, str]) -> Iterator[str]:
    rest = {name: value for name, value in details.items() if value not in ("", "0")}
    start, to = rest.pop("from", "") or rest.pop("back_to", ""), rest.pop("to", "")  # `back_to`: in journals of earlier releases
    if to:
        rest.pop("version", None)
        yield f"{start or 'no version'} → {to}" if start != to else f"version {to}"
    elif start:
        yield f"from {start}"
    for name, value in sorted(rest.items()):
        if name == "request":
            yield from _request(value)
        else:
            yield f"{_words(name)} {_words(value.lower()) if name == 'strategy' else value}"


def _request(text: str) -> Iterator[str]:
    """Yield the fields of an operator's request, which is JSON; a request too long for the journal is cut off, and not shown."""
    try:
        request = json.loads(text)
    except ValueError:
        return
    fleet = request.pop("fleet", {})
    fields = fleet if isinstance(fleet, dict) else {}
    for name, value in {**fields, **request}.items():
        if name not in ("name", "update_mask", "request_id", "reason", "fleet"):
            yield from _field(name, value)


def _field(name: str, value: object) -> Iterator[str]:
    if isinstance(value, dict):
        kind = str(value.pop("kind", "")).lower()
        inner = " ".join(text for field, one in value.items() for text in _field(field, one))
        yield " ".join(filter(None, (_words(name), kind.replace("_", " "), inner)))
    elif isinstance(value, bool):
        yield _words(name) if value else f"not {_words(name)}"
    elif isinstance(value, list):
        yield f"{_words(name)} {' and '.join(map(str, value))}"
    else:
        yield f"{_words(name)} {str(value).lower() if str(value).isupper() else value}"


def _words(name: str) -> str:
    return name.replace("_", " ")

"""Names of a caller: `dns:…`, `uri:…`, `email:…`, `ip:…`, `cn:…` of its certificate, `token:…`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resharder.server.state.errors import Unauthenticated

KINDS = ("dns", "uri", "email", "ip", "cn", "token")
_OF_GRPC = {"dns": "peer_dns", "uri": "peer_uri", "email": "peer_email", "ip": "peer_ip", "cn": "x509_common_name"}
_OF_SSL = {"DNS": "dns", "URI": "uri", "email": "email", "IP Address": "ip"}


def identity(kind: str, name: str) -> str:
    """Return the name `kind:name` of an identity. DNS names are lower-cased."""
    return f"{kind}:{name.lower() if kind == 'dns' else name}"


def of_grpc(properties: Mapping[str, Sequence[bytes]]) -> tuple[str, ...]:
    """Return the names in `ServicerContext.auth_context()`, which come from verified certificates only."""
    found = [(kind, value) for kind, key in _OF_GRPC.items() for value in properties.get(key, ())]
    return tuple(identity(kind, value.decode(errors="replace")) for kind, value in found)


def of_ssl(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the names in `SSLSocket.getpeercert()`."""
    found = certificate or {}
    names = [(_OF_SSL[kind], name) for kind, name in found.get("subjectAltName", ()) if kind in _OF_SSL]
    common = [("cn", value) for part in found.get("subject", ()) for key, value in part if key == "commonName"]
    return tuple(identity(kind, name) for kind, name in [*names, *common])


def bearer(headers: Iterable[str]) -> str:
    """Return the token of `authorization` headers, or an empty string. Raises Unauthenticated (TOKEN_UNKNOWN)."""
    found = list(headers)
    if not found:
        return ""
    scheme, _, token = found[0].partition(" ")
    if len(found) > 1 or scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("TOKEN_UNKNOWN", "the call needs one authorization header: Bearer TOKEN")
    return token.strip()

"""TLS of the HTTP ports, and access to the status page's: the same certificates, viewers only.

A token may also be the password of basic authentication, for which browsers prompt.
"""

import base64
import binascii
import ssl
from collections.abc import Sequence
from http import HTTPStatus

import structlog
from resharder.server.security.access import Access, watched_pems
from resharder.server.security.files import Watched
from resharder.server.security.settings import Security
from resharder.server.state.errors import DaemonError, ResourceExhausted, Unauthenticated
from resharder.server.web.app import AccessCheck
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

_log = structlog.get_logger("resharder.security")
_ASK = ("WWW-Authenticate", 'Basic realm="resharder: the token as password"')


def access_check(access: Access) -> AccessCheck:
    """Return the check of the status page's port, which admits viewers."""

    def check(request: Request) -> Response | None:
        try:
            access.viewer(_bearers(request.headers.getlist("authorization")), request.state.certificate, "web")
        except DaemonError as error:
            status = _status(error)
            headers = dict([_ASK]) if status == HTTPStatus.UNAUTHORIZED else {}
            return PlainTextResponse(f"{error}\n", status, headers)
        return None

    return check


def tls_context(security: Security, *, required: bool = False) -> ssl.SSLContext:
    """Return a TLS context whose every handshake uses the files' current content.

    With `client_ca`, client certificates are verified; without `required` they are optional, because probes have none. Raises
    SecurityFilesError.
    """
    files = [path for path in (security.certificate, security.key, security.client_ca) if path is not None]
    watched_pems(security)  # for an error that names the files
    made = Watched(files, lambda: _context(security, required))

    def choose(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = made.value

    front = _context(security, required)
    front.sni_callback = choose  # also called without a name
    return front


def _context(security: Security, required: bool) -> ssl.SSLContext:
    """Return a TLS context. Raises OSError (ssl.SSLError)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(security.certificate, security.key, password="")
    if security.client_ca is not None:
        context.load_verify_locations(security.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def _bearers(headers: Sequence[str]) -> list[str]:
    return [f"Bearer {_password(header)}" if header[:6].lower() == "basic " else header for header in headers]


def _password(header: str) -> str:
    try:
        return base64.b64decode(header[6:], validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _status(error: DaemonError) -> HTTPStatus:
    if isinstance(error, Unauthenticated):
        return HTTPStatus.UNAUTHORIZED
    return HTTPStatus.TOO_MANY_REQUESTS if isinstance(error, ResourceExhausted) else HTTPStatus.FORBIDDEN

"""Azure's blob service, as Azurite has it on this host. Needs the command `azurite-blob`, which `make test-azure` installs."""

import base64
import hashlib
import hmac
import http.client
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate

import pytest

from tests.support.observing import wait_until
from tests.support.ports import free_port

UNAVAILABLE = "" if shutil.which("azurite-blob") else "azurite-blob is not installed: run make test-azure"
ACCOUNT, CONTAINER = "devstoreaccount1", "versions"
# Azurite's well-known key.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a service with an empty container, let the environment name it, and yield a URL in it. Skips the test without one."""
    if UNAVAILABLE:
        pytest.skip(UNAVAILABLE)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["azurite-blob", "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", folder]
        service = subprocess.Popen([*command, "--blobHost", "127.0.0.1", "--blobPort", str(port)], stdout=subprocess.DEVNULL)
        try:
            wait_until(lambda: _created(port), "Azurite answers", 60)
            monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
            monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
            monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
            yield f"az://{CONTAINER}/here"
        finally:
            service.kill()
            service.wait()


def _created(port: int) -> bool:
    """Create the container, signed by the account's key."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    signed = "PUT" + "\n" * 12 + named + f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
        connection.request("PUT", f"/{ACCOUNT}/{CONTAINER}?restype=container", headers=headers)
        return connection.getresponse().status == 201
    except OSError:
        return False
    finally:
        connection.close()

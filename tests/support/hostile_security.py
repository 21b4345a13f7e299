"""Damaged certificates, keys and tokens, and the code of the daemon and of clients that reads them."""

from pathlib import Path
from random import Random

from resharder.client.errors import UsageError
from resharder.client.rpc.daemon_channel import DaemonChannel
from resharder.client.rpc.tls import Tls
from resharder.server.security.files import Pems, SecurityFilesError, Watched, hash_of, read_pems, read_tokens, server_credentials

from tests.support.hostile_files import ACCEPTED, Workspace, spoil
from tests.support.secure import Authority

_FILES = ("ca.pem", "daemon.pem", "daemon.key")


def _valid(folder: Path) -> dict[str, bytes]:
    authority = Authority(folder / "authority")
    return {name: (authority.folder / name).read_bytes() for name in _FILES}


def _damaged(random: Random, files: dict[str, bytes]) -> dict[str, bytes]:
    """Return the files with one of them spoiled, cut, repeated, or in the place of another."""
    name = random.choice(list(files))
    content = files[name]
    lines = content.split(b"\n")
    at = random.randrange(len(lines))
    changed = random.choice(
        (
            spoil(random, content),
            content[: random.randrange(len(content))],
            b"\n".join(lines[:at] + lines[at + 1 :]),
            b"\n".join([*lines[:at], lines[at][::-1], *lines[at + 1 :]]),
            content + spoil(random, content),
            random.choice(list(files.values())),
        )
    )
    return files | {name: changed}


def tls_files(random: Random, workspace: Workspace) -> str:
    """Read certificates and keys, at the start and while in use, as the daemon and as a client."""
    valid, folder = workspace.once("authority", _valid), workspace.fresh()
    ca, certificate, key = (folder / name for name in _FILES)

    def write(files: dict[str, bytes]) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    def read() -> Pems:
        return read_pems(certificate, key, ca)

    write(valid)
    in_use = Watched([certificate, key, ca], read)
    server_credentials(in_use)
    client = DaemonChannel("127.0.0.1:1", Tls(ca, certificate, key), [])
    write(_damaged(random, valid))
    try:
        client.now()
        expected = Pems(valid["daemon.pem"], valid["daemon.key"], valid["ca.pem"])
        try:
            again = Watched([certificate, key, ca], read)
            server_credentials(again)
            started, expected = True, again.value
        except SecurityFilesError:
            started = False
        assert in_use.value == expected, "the files in use are neither the old ones nor the new ones"
        try:
            DaemonChannel("127.0.0.1:1", Tls(ca, certificate, key), []).close()
        except UsageError:
            return "UsageError of the client alone" if started else "UsageError"
        return ACCEPTED if started else "SecurityFilesError"
    finally:
        client.close()


def token_files(random: Random, workspace: Workspace) -> str:
    """Read the daemon's list of tokens and a client's token, at the start and while in use."""
    valid, folder = workspace.once("authority", _valid), workspace.fresh()
    (folder / "ca.pem").write_bytes(valid["ca.pem"])
    listed, own = folder / "tokens", folder / "token"
    lines = f"# of the team\nalice sha256:{hash_of('a' * 40)}\nbob-2 sha256:{hash_of('b' * 40)} # until May\n".encode()
    listed.write_bytes(lines)
    own.write_bytes(b"a" * 40 + b"\n")
    in_use = Watched([listed], lambda: read_tokens(listed))
    client = DaemonChannel("127.0.0.1:1", Tls(folder / "ca.pem", token_file=own), [])
    before, sent = in_use.value, client.metadata()
    listed.write_bytes(spoil(random, lines))
    own.write_bytes(random.choice((spoil(random, b"a" * 40 + b"\n"), b"", b"a\nb", b"\xff", "ä".encode(), b"a b", b"\0")))
    try:
        try:
            tokens = read_tokens(listed)
        except (OSError, ValueError):
            tokens = None
        assert in_use.value == (before if tokens is None else tokens), "the list in use is neither the old one nor the new one"
        assert all(len(each) == 64 and name for each, name in in_use.value.items())
        ((name, value),) = client.metadata()
        assert name == "authorization"
        assert value.isascii(), f"a call would fail with {value!r}"
        assert value.isprintable(), f"a call would fail with {value!r}"
        try:
            DaemonChannel("127.0.0.1:1", Tls(folder / "ca.pem", token_file=own), []).close()
        except UsageError:
            assert client.metadata() == sent
            return "UsageError"
        return ACCEPTED if tokens is not None else "ValueError"
    finally:
        client.close()

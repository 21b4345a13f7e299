"""Objects of an archive: in a folder and in a bucket alike."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resharder.server.archive.remote import Remote
from resharder.server.state.errors import FailedPrecondition, ResourceNotFound, Unavailable

from tests.support import bucket
from tests.support.bucket import Bucket

BIG = 21 << 20  # three parts of an upload, two ranges of a read


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket.opened(monkeypatch) as found:
        yield found


@pytest.fixture(params=["folder", "s3", pytest.param("azure", marks=pytest.mark.process)])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    if request.param == "folder":
        return Remote(str(tmp_path / "a folder" / "in it"))
    return Remote(request.getfixturevalue("s3").url if request.param == "s3" else request.getfixturevalue("azure"))


def test_an_object_comes_back_as_it_was_written(remote: Remote) -> None:
    content = bytes(range(256)) * (BIG >> 8)
    remote.write("m/1/big", (content[at : at + 1000000] for at in range(0, BIG, 1000000)), BIG)
    remote.write("m/1/none", iter(()), 0)
    remote.write("m/2/ä b%20c", [b"x", b"y"], 2)
    assert b"".join(remote.chunks("m/1/big", BIG)) == content
    assert remote.read("m/1/big", 1000, 1300) == content[1000:1300]
    for name, size in (("none", 0), ("none", 1), ("other", 1), ("other", BIG), ("big", BIG - 1), ("big", BIG + 1), ("big", 1)):
        assert list(remote.chunks(f"m/1/{name}", size)) == []
    assert (remote.size("m/1/big"), remote.size("m/1/none"), remote.size("m/1/other")) == (BIG, 0, None)
    assert (remote.names(), remote.names("m"), remote.names("m/1"), remote.names("no")) == (
        ["m"],
        ["1", "2"],
        ["big", "none"],
        [],
    )
    assert remote.names("m/2") == ["ä b%20c"]
    remote.remove("m/1/none")
    remote.remove("m/1/none")
    assert remote.names("m/1") == ["big"]


def test_of_many_writers_of_an_object_one_wins(remote: Remote) -> None:
    contents = [b"writer %d" % number for number in range(8)]
    together = threading.Barrier(len(contents))

    def create(content: bytes) -> bool:
        together.wait()
        return remote.create("m/pointer", content)

    with ThreadPoolExecutor(len(contents)) as threads:
        won = list(threads.map(create, contents))
    assert won.count(True) == 1
    there = remote.content("m/pointer")
    assert there is not None
    assert there.bytes == contents[won.index(True)]

    def replace(content: bytes) -> bool:
        together.wait()
        return remote.replace("m/pointer", content, there.tag)

    later = [content + b" again" for content in contents]
    with ThreadPoolExecutor(len(contents)) as threads:
        won = list(threads.map(replace, later))
    assert won.count(True) == 1
    now = remote.content("m/pointer")
    assert now is not None
    assert now.bytes == later[won.index(True)]
    assert not remote.replace("m/other", b"", now.tag)
    assert not remote.replace("m/pointer", b"late", there.tag)


def test_a_writer_that_repeats_its_request_finds_that_it_has_won(remote: Remote) -> None:
    assert remote.create("m/pointer", b"mine")
    assert remote.create("m/pointer", b"mine")
    assert not remote.create("m/pointer", b"another's")


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_nothing_of_a_write_is_seen_whose_source_fails(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> None:
    remote = Remote(str(tmp_path) if place == "folder" else request.getfixturevalue("s3").url)

    def source() -> Iterator[bytes]:
        yield bytes(BIG)
        raise ResourceNotFound("VERSION_GONE", "the version was retired")

    with pytest.raises(ResourceNotFound, match="was retired"):
        remote.write("m/1", source(), BIG)
    assert remote.size("m/1") is None


def test_a_request_that_is_refused_for_a_moment_is_repeated(s3: Bucket) -> None:
    remote, statuses = Remote(s3.url), [503, 500, 429]
    s3.before = lambda method, path: statuses.pop() if statuses else None
    remote.write("m/1", [b"content"], 7)
    assert statuses == []
    statuses += [500, 503]
    assert b"".join(remote.chunks("m/1", 7)) == b"content"
    assert statuses == []


def test_a_bucket_that_fails_is_named_without_its_secrets(s3: Bucket) -> None:
    remote = Remote(s3.url)
    s3.before = lambda method, path: 403
    with pytest.raises(Unavailable, match=r"s3://versions/here/m/1: .*403") as failed:
        remote.content("m/1")
    assert "a-secret" not in str(failed.value)
    assert failed.value.reason == "ARCHIVE_FAILED"
    s3.before = lambda method, path: 500
    with pytest.raises(Unavailable, match="500"):
        remote.create("m/1", b"")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nothing://there", "expected a folder, or a URL of s3, gs, az or file"),
        ("https://there/x", "expected a folder, or a URL of s3, gs, az or file"),
        ("az://container/path", "Account must be specified"),
        ("s3://", "cannot use s3://"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_by_name(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FailedPrecondition, match=message):
        Remote(url)


def test_urls_of_buckets_and_folders_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for url in ("s3://b/p", "gs://b/p", "az://container/p", "abfss://container@account.dfs.core.windows.net/p"):
        assert Remote(f"{url}/").url == url
    monkeypatch.chdir(tmp_path)
    for url in (f"file://{tmp_path}/a%20b", f"{tmp_path}/a b/", "a b"):
        assert Remote(url).url == f"file://{tmp_path}/a b"

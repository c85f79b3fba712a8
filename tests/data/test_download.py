"""Downloads that break off, resume, and lie."""

from __future__ import annotations

from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from lbq.data import download
from lbq.errors import DataError
from tests.support.hosting import Handler, Host
from tests.support.reading import one_line, refused


def test_a_whole_download(host: Host, tmp_path: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    target = tmp_path / "new" / "file"
    download.fetch(host.url, target, host.md5, len(host.body), lambda done, total: steps.append((done, total)))
    assert target.read_bytes() == host.body
    assert [path.name for path in target.parent.iterdir()] == ["file"]
    assert steps == sorted(steps)
    assert steps[-1] == (700_000, 700_000)
    assert len(steps) > 1
    download.fetch(host.url, target, host.md5, len(host.body))
    assert len(host.ranges) == 1  # it was there
    target.write_bytes(b"wrong")
    download.fetch(host.url, target, host.md5, len(host.body))
    assert target.read_bytes() == host.body


def test_a_folder_takes_one_download_at_a_time(host: Host, tmp_path: Path) -> None:
    """Two would write one partial file; the second is refused, and the first goes on."""
    refused: list[str] = []

    def another(done: int, total: int | None) -> None:
        with pytest.raises(DataError, match="another process downloads to") as error:
            download.fetch(host.url, tmp_path / "file", host.md5, len(host.body))
        refused.append(one_line(error))

    download.fetch(host.url, tmp_path / "file", host.md5, len(host.body), another)
    assert refused
    assert (tmp_path / "file").read_bytes() == host.body
    (tmp_path / "file").unlink()
    download.fetch(host.url, tmp_path / "file", host.md5, len(host.body))  # it is free again


def test_a_cut_download_continues(host: Host, tmp_path: Path) -> None:
    target = tmp_path / "file"
    host.plan = ["cut:100000", "cut:0", "cut:50000"]
    with refused("cut 3 times after 150000 bytes.*run the same command again.*by hand"):
        download.fetch(host.url, target, host.md5, len(host.body))
    assert [path.name for path in tmp_path.iterdir()] == ["file.partial"]
    host.plan = ["cut:1000"]
    steps: list[int] = []
    download.fetch(host.url, target, host.md5, len(host.body), lambda done, _: steps.append(done))
    assert host.ranges == [None, "bytes=100000-", "bytes=100000-", "bytes=150000-", "bytes=151000-"]
    assert steps[0] == 151_000
    assert target.read_bytes() == host.body


def test_a_download_cut_before_its_first_byte(host: Host, tmp_path: Path) -> None:
    host.plan = ["cut:0"] * download.ATTEMPTS
    with pytest.raises(DataError, match="cut 3 times after 0 bytes in all: run the same command again"):
        download.fetch(host.url, tmp_path / "file", host.md5, len(host.body))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["ignore", "shifted", "unsized"])
def test_servers_that_resume_badly(host: Host, tmp_path: Path, how: str) -> None:
    target = tmp_path / "file"
    (tmp_path / "file.partial").write_bytes(host.body[:1000])
    host.plan = [how]
    download.fetch(host.url, target, host.md5, len(host.body))
    assert host.ranges[0] == "bytes=1000-"
    assert target.read_bytes() == host.body
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_answer_without_bytes_costs_nothing(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(host.body[:1000])
    host.plan = ["ignore:0"]  # begins again from the start, and is cut at once
    download.fetch(host.url, tmp_path / "file", host.md5, len(host.body))
    assert host.ranges == ["bytes=1000-", "bytes=1000-"]


def test_partials_that_are_whole_or_wrong(host: Host, tmp_path: Path) -> None:
    target, partial, size = tmp_path / "file", tmp_path / "file.partial", len(host.body)
    partial.write_bytes(host.body)
    download.fetch(host.url, target, host.md5, size)
    assert host.ranges == []  # only verified
    target.unlink()
    partial.write_bytes(host.body + b"x")
    download.fetch(host.url, target, host.md5, size)
    assert host.ranges == [None]
    target.unlink()
    partial.write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match=r"gave a file with md5 \w{32} instead of \w{32}: it was removed; download"):
        download.fetch(host.url, target, host.md5, size)
    assert list(tmp_path.iterdir()) == []
    download.fetch(host.url, target, host.md5, size)
    assert target.read_bytes() == host.body


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "with a file of 0 bytes instead of 700000"),
        ("page", "with a web page instead of the file"),
        ("plain:typed", "with a web page instead of the file"),
        ("status:404", "with HTTP 404 Not Found"),
        ("status:503", "with HTTP 503"),
    ],
)
def test_answers_that_are_not_the_file(host: Host, tmp_path: Path, how: str, message: str) -> None:
    target, partial = tmp_path / "file", tmp_path / "file.partial"
    for before in (None, host.body[:1000]):
        if before:
            partial.write_bytes(before)
        host.plan = [how]
        with pytest.raises(DataError, match=f"the host answered .*/file {message}") as error:
            download.fetch(host.url, target, host.md5, len(host.body))
        text = one_line(error)
        assert f"download {host.url} by hand (md5 {host.md5}) to {target}" in text
        assert not target.exists()
        assert (partial.read_bytes() if partial.exists() else None) == before  # nothing of it was written


def test_a_partial_longer_than_the_hosts_file_is_removed(host: Host, tmp_path: Path) -> None:
    (tmp_path / "file.partial").write_bytes(host.body[:1000])
    md5, size, host.body = host.md5, len(host.body), host.body[:500]  # the host answers HTTP 416
    with pytest.raises(DataError, match=r"gave a file with md5 \w{32} instead of \w{32}: it was removed; download"):
        download.fetch(host.url, tmp_path / "file", md5, size)
    assert list(tmp_path.iterdir()) == []


def test_wrong_sizes_are_refused(host: Host, tmp_path: Path) -> None:
    target = tmp_path / "file"
    with pytest.raises(DataError, match="with a file of 700000 bytes instead of 123"):
        download.fetch(host.url, target, host.md5, 123)
    host.body, md5, size = host.body + bytes(2_000_000), host.md5, len(host.body)
    host.plan = ["unsized"]
    with pytest.raises(DataError, match="with more than 700000 bytes"):
        download.fetch(host.url, target, md5, size)
    assert list(tmp_path.iterdir()) == []


def test_hosts_and_disks_that_fail(tmp_path: Path, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        url = f"http://127.0.0.1:{closed.server_address[1]}/x"
    with refused(r"cannot reach .*refused.*: download .* by hand"):
        download.fetch(url, target, host.md5, len(host.body))
    (tmp_path / "flat").write_text("")
    with pytest.raises(DataError, match="cannot write .*flat/file: .*free space or choose another root"):
        download.fetch(host.url, tmp_path / "flat" / "file", host.md5, len(host.body))
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.5)
    host.plan = ["stall:0", "stall:300000", "plain"]  # timeouts in mid-air count as cuts
    download.fetch(host.url, target, host.md5, len(host.body))
    assert host.ranges == [None, None, "bytes=262144-"]
    assert target.read_bytes() == host.body
    target.unlink()
    monkeypatch.setattr(Handler, "do_GET", lambda self: host.release.wait(60))
    with pytest.raises(DataError, match="cannot reach .*timed out"):
        download.fetch(host.url, target, host.md5, len(host.body))
    assert not target.exists()

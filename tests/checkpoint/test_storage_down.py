"""Storage that cannot be reached when the job begins, or later: it is tried again for as long as the job lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_tools import check, finish, newest, snapshot, writing
from ftp_server import FtpServer
from harness import until

from shared_core.checkpoint import lineage
from shared_core.checkpoint.command import Command
from shared_core.checkpoint.spool import Spool
from shared_core.checkpoint.storage import open_storage


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FtpServer]:
    (tmp_path / "served").mkdir()
    made = FtpServer(tmp_path / "served")
    yield made
    made.close()


@pytest.mark.nightly
def test_a_server_that_is_down_at_the_start_and_once_more_later(server: FtpServer, spool: Spool) -> None:
    """Two lines each time: it cannot be reached, and it works again."""
    with writing(spool) as writer:
        snapshot(spool, 10, server.url)
        until(lambda: spool.status().failed == 10, "step 10 to fail")
        server.up()
        until(lambda: spool.status().committed.get("step") == 10, "step 10")
        server.down()
        snapshot(spool, 20, server.url)
        until(lambda: spool.status().failed == 20, "step 20 to fail")
        server.up()
        until(lambda: spool.status().committed.get("step") == 20, "step 20")
        check(newest(server.url), 20)
        code, said = finish(writer)
    assert code == 0 and len(said) == 4, said
    assert " cannot be reached (" in said[0] and all(server.url in line for line in said[::2]), said
    assert all("checkpoints can be written again" in line for line in said[1::2])


def test_what_the_library_raises_is_an_os_error_here(server: FtpServer) -> None:
    storage = open_storage(server.url)
    server.up()
    assert storage.names() == []
    server.down()
    for call in (storage.names, storage.exists, lambda: storage.size("x"), lambda: list(storage.chunks("x"))):
        with pytest.raises(OSError):
            call()
    said: list[str] = []
    assert lineage.read(server.url, Command("0" * 16, "x.py").key, said.append) == lineage.Contents()
    assert len(said) == 1 and "cannot be listed" in said[0] and "this start continues none of them" in said[0]

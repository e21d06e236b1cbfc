"""A machine that keeps copies, for tests of who is admitted to them."""

from __future__ import annotations

import json
import socket
import struct
from pathlib import Path

from shared_core.checkpoint.spool import Sealed, Spool
from shared_core.launcher.mirror import MirrorServer, fetch
from shared_core.launcher.neighbour import NeighbourCopies
from shared_core.system import secret
from shared_core.system.snapshot_wire import LIST, ask
from shared_core.system.wire import connect
from shared_core.worker.state.publications import Mirror

KEY = b"k" * 32
HEAD = struct.Struct("<cIIHQ")


class Site:
    """One machine's server, which has a copy of rank 1 and a snapshot of its own."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job"
        self.job.mkdir(mode=0o700)
        secret.leave(self.job, KEY)
        self.copies = NeighbourCopies(self.job / "checkpoints")
        self.server = MirrorServer(self.job / "mirror", self.copies.serve, key=KEY)
        self.name = f"127.0.0.1:{self.server.port}#x"
        own = folder / "own"
        own.mkdir()
        (own / "boundary.7").write_bytes(b"STATE")
        self.mirror = Mirror(1, 0, 0, own, KEY)
        self.mirror.follow((None, self.name))
        self.mirror.sync()
        spool = Spool(self.job / "checkpoints")
        (spool.folder_of(40) / "model").write_bytes(b"STATE")
        spool.seal(Sealed(40, 0, 2, (0,), ("model",), {"session": "s"}))

    def dial(self) -> socket.socket:
        """A connection on which nothing is proved yet."""
        return socket.create_connection(("127.0.0.1", self.server.port), 10.0)

    def check(self) -> None:
        """All is there, and the server answers who knows the secret."""
        got = self.job / "rank1"
        fetch([self.name], [1], 0, self.job)
        assert (got / "attempt0/boundary.7").read_bytes() == b"STATE"
        with connect(self.name, KEY) as link:
            ask(link, LIST, {})
            assert [one["key"] for one in json.loads(link.receive().data)] == [[0, 40]]
        self.check_copies()

    def check_copies(self) -> None:
        """What is kept for the other machine is as it was."""
        folder = self.job / "mirror/rank1/attempt0"
        assert [path.name for path in folder.iterdir()] == ["boundary.7"]
        assert (folder / "boundary.7").read_bytes() == b"STATE" and self.copies.begun is None

    def close(self) -> None:
        """End all of it."""
        self.mirror._drop()
        self.server.close()
        self.copies.close()


def rest(sock: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    got = b""
    try:
        while piece := sock.recv(1 << 16):
            got += piece
    except ConnectionResetError:
        pass
    return got

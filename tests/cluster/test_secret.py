"""Strangers at the port where a machine keeps copies for others: they learn nothing, and stop nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from util import ROOT, run

from shared_core.checkpoint import Sealed, Spool
from shared_core.errors import ConfigError
from shared_core.launcher.mirror import Mirror, MirrorServer, fetch
from shared_core.launcher.neighbour import Copies
from shared_core.system import secret
from shared_core.system.wire import connect, frames, send_frame
from shared_core.worker.near import LIST, PUT, ask

KEY, OTHER = b"k" * 32, b"o" * 32
HEAD = struct.Struct("<cIIHQ")


class Site:
    """One machine's server, which has a copy of rank 1 and a snapshot of its own."""

    def __init__(self, folder: Path) -> None:
        self.job = folder / "job"
        self.job.mkdir(mode=0o700)
        secret.leave(self.job, KEY)
        self.copies = Copies(self.job / "checkpoints")
        self.server = MirrorServer(self.job / "mirror", self.copies.serve, KEY)
        self.name = f"127.0.0.1:{self.server.port}#x"
        own = folder / "own"
        own.mkdir()
        (own / "top.7").write_bytes(b"STATE")
        self.mirror = Mirror(1, 0, 0, own, KEY)
        self.mirror.follow((None, self.name))
        self.mirror.sync()
        spool = Spool(self.job / "checkpoints")
        (spool.folder_of(40) / "model").write_bytes(b"STATE")
        spool.seal(Sealed(40, 0, 2, (0,), ("model",), {"session": "s"}))

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), 10.0)

    def check(self) -> None:
        """All is there, and the server answers who knows the secret."""
        got = self.job / "rank1"
        assert fetch([self.name], [1], 0, self.job) == {1: 5} and (got / "attempt0/top.7").read_bytes() == b"STATE"
        with connect(self.name, KEY) as sock:
            ask(sock, LIST, {})
            assert [one["key"] for one in json.loads(next(frames(sock))[4])] == [[0, 40]]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.mirror._drop()
    made.server.close()
    made.copies.close()


def rest(sock: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    got = b""
    try:
        while piece := sock.recv(1 << 16):
            got += piece
    except ConnectionResetError:
        pass
    return got


def test_strangers_are_refused(site: Site) -> None:
    """None of these gets more than the server's random number, and nothing of what it sends is done."""
    wanted = [HEAD.pack(b"g", 1, 0, 0, 0), HEAD.pack(b"L", 0, 0, 0, 2) + b"{}", HEAD.pack(b"w", 1, 0, 0, 1 << 62)]
    wanted += [HEAD.pack(b"e", 1, 0, 0, 0), HEAD.pack(b"w", 1, 0, 7, 6) + b"top.999forged"]
    for raw in wanted:
        with site.dial() as sock:
            sock.sendall(raw.ljust(64, b"\0"))
            assert len(rest(sock)) == 40, raw
    with pytest.raises(OSError, match="another --secret-file"):
        connect(site.name, OTHER)
    with pytest.raises(OSError, match="started without --secret-file"):
        connect(site.name)
    with site.dial() as first, site.dial() as second:  # what one connection proved is of no use on another
        hello = first.recv(40, socket.MSG_WAITALL)
        second.recv(40, socket.MSG_WAITALL)
        mine = os.urandom(32)
        proof = secret._proof(KEY, b"client", hello[8:], mine)
        second.sendall(mine + proof)
        assert rest(second) == b""
        first.sendall(mine + proof[::-1])
        assert rest(first) == b""
    site.check()


@pytest.mark.parametrize("has", [b"s", b"o"])
def test_a_server_must_know_it_too(has: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets no byte of state."""
    monkeypatch.setattr("shared_core.launcher.mirror._TROUBLE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mirror = Mirror(0, 0, 0, Path("/nowhere"), KEY)
        mirror.follow((None, f"127.0.0.1:{listener.getsockname()[1]}#x"))
        with listener.accept()[0] as sock:
            sock.settimeout(10.0)
            sock.sendall(b"swift-1" + has + bytes(32) + bytes(32))
            assert len(rest(sock)) == (64 if has == b"s" else 0)


@pytest.mark.parametrize(
    "raw",
    [
        HEAD.pack(b"w", 1, 0, 1, 1 << 62) + b"x",
        HEAD.pack(b"P", 1, 0, 1, 1 << 33) + b"x",
        HEAD.pack(b"w", 1, 0, 60_000, 0),
        HEAD.pack(b"w", 1, 0, 2, 0) + b"\xff\xfe",
        HEAD.pack(b"e", 1, 0, 0, 0),
        HEAD.pack(b"?", 1, 0, 0, 0),
        HEAD.pack(b"P", 0, 0, 0, 2) + b"[]",
        HEAD.pack(b"G", 0, 0, 0, 26) + b'{"where":[],"key":[0,40]} ',
    ],
)
def test_frames_that_are_wrong_do_no_harm(raw: bytes, site: Site) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with connect(site.name, KEY) as sock:
        sock.sendall(raw)
        sock.settimeout(10.0)
        assert rest(sock) == b""
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10), "in KiB"
    site.check()


@pytest.mark.parametrize(
    "note",
    ["5", "{}", "[]", '{"step": 1, "rank": 0, "world_size": 1, "local": 3, "files": [], "meta": 1, "target": 1}'],
)
def test_notes_that_seal_nothing_are_refused(note: str, site: Site) -> None:
    with connect(site.name, KEY) as sock:
        ask(sock, PUT, {"attempt": 10**9, "step": 1, "files": {}, "notes": {"rank0.sealed": note}})
        assert rest(sock) == b""
    assert site.copies.begun is None
    site.check()


SERVER = """
import os, resource, sys
from pathlib import Path
from shared_core.launcher.mirror import MirrorServer
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
server = MirrorServer(Path(sys.argv[1]), key=b"k" * 32)
print(server.port, flush=True)
for line in sys.stdin:
    if line == "take\\n":
        taken = []
        while server._served:
            pass
        while True:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
    else:
        [os.close(fd) for fd in taken]
    print("done", flush=True)
"""


def test_silent_strangers_and_too_few_descriptors_stop_nobody(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path / "mirror")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        port = int(process.stdout.readline())

        def answers() -> bool:
            with connect(f"127.0.0.1:{port}#x", KEY) as sock:
                send_frame(sock, b"s", 0, 0)
                return sock.recv(1) == b"."

        held = [socket.create_connection(("127.0.0.1", port), 10.0) for _ in range(200)]
        assert answers(), "200 are silent, three times as many as the server has descriptors"
        for each in held:
            each.close()
        assert answers()

        def say(word: str) -> None:
            process.stdin.write(word + "\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
            process.stdout.readline()  # type: ignore[union-attr]

        say("take")
        place = ("127.0.0.1", port)
        # While it waits for a connection, the kernel holds a descriptor for the next one.
        with socket.create_connection(place, 10.0), socket.create_connection(place, 10.0) as waits:
            waits.settimeout(0.3)
            with pytest.raises(TimeoutError):
                waits.recv(1)  # it has seen that there is no descriptor left
            say("give back")
            waits.settimeout(10.0)
            assert waits.recv(7) == b"swift-1"
        assert answers()
        process.stdin.close()


@pytest.mark.parametrize(
    ("mode", "content", "says"),
    [
        (0o640, "s" * 40, "can be read by others"),
        (0o604, "s" * 40, "can be read by others"),
        (0o600, "short", "must hold 16 to 4096 bytes"),
        (0o600, "s" * 5000, "must hold 16 to 4096 bytes"),
        (0o600, None, "cannot be read"),
        (0o600, "fifo", "is not a file"),
        (0o700, "folder", "Is a directory"),
    ],
)
def test_a_secret_file_that_is_none(mode: int, content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    if content == "fifo":
        os.mkfifo(path, 0o600)
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says) as error:
        secret.read(str(path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


SCRIPT = """
import json, os
from pathlib import Path
from shared_core.system import secret
from shared_core.protocol import worker_env
me = worker_env.env()
tag = os.environ["SWIFT_TEST_TAG"].encode()
key = secret.of_job(me.job_dir)
words = []
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and tag in (entry / "environ").read_bytes():
            words += [(entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()]
    except OSError:
        pass
mode = (me.job_dir / secret.FILE).stat().st_mode & 0o777 if key else 0
import socket
host, port = me.machines[0].partition("#")[0].split(":")
with socket.create_connection((host, int(port)), 10) as sock:
    hello = sock.recv(8)
os.write(1, (json.dumps({"key": key and key.hex(), "mode": mode, "hello": hello.decode(), "processes": len(words) // 2,
    "shown": any(key in word or key.hex().encode() in word or b"TOP SECRET" in word for word in words) if key else 0,
}) + "\\n").encode())
"""


@pytest.mark.parametrize("given", ["flag", pytest.param("variable", marks=pytest.mark.nightly), "none"])
def test_a_job_on_several_machines(given: str, tmp_path: Path, free_port: int) -> None:
    """Its workers have the job's key, from a file; without a secret the user is told what is open."""
    path = tmp_path / "secret"
    path.write_text("TOP SECRET TOP SECRET\n")
    path.chmod(0o600)
    options = ["--nnodes=1", "--spare-nodes=1", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-id=job"]
    if given == "flag":
        options.append(f"--secret-file={path}")
    env = {secret.VARIABLE: str(path)} if given == "variable" else {}
    job = run(tmp_path, SCRIPT, nproc=1, options=options, env=env)
    assert job.code == 0, job.stderr
    [said] = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert said["processes"] >= 2 and not said["shown"]
    warned = sum("without --secret-file" in line for line in job.stderr.splitlines())
    if given == "none":
        assert (said["key"], said["hello"], warned) == (None, "swift-1o", 1), job.stderr
    else:
        key = secret.derive(b"TOP SECRET TOP SECRET", "job")
        assert key is not None and (said["key"], said["mode"]) == (key.hex(), 0o600)
        assert (said["hello"], warned) == ("swift-1s", 0), job.stderr

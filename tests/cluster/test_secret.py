"""Others at the port where a machine keeps copies for others: they learn nothing, and stop nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from keeping import HEAD, KEY, Site, rest
from util import LISTENERS, ROOT, run

from shared_core.errors import ConfigError
from shared_core.system import secret
from shared_core.system.wire import connect
from tests.support.ports import free_ports

OTHER = b"o" * 32


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_strangers_are_refused(site: Site) -> None:
    """None of these gets more than the server's random number, and nothing of what it sends is done."""
    wanted = [HEAD.pack(b"g", 1, 0, 0, 0), HEAD.pack(b"L", 0, 0, 0, 2) + b"{}", HEAD.pack(b"w", 1, 0, 0, 1 << 62)]
    wanted += [HEAD.pack(b"e", 1, 0, 0, 0), HEAD.pack(b"w", 1, 0, 12, 6) + b"boundary.999forged"]
    for raw in wanted:
        with site.dial() as sock:
            sock.sendall(raw.ljust(64, b"\0"))
            assert len(rest(sock)) == 39, raw
    with pytest.raises(OSError, match="another secret"):
        connect(site.name, OTHER)
    with site.dial() as first, site.dial() as second:  # what one connection proved is of no use on another
        hello = first.recv(39, socket.MSG_WAITALL)
        second.recv(39, socket.MSG_WAITALL)
        mine = os.urandom(32)
        proof = secret._proof(KEY, b"client", hello[7:], mine)
        second.sendall(mine + proof)
        assert rest(second) == b""
        first.sendall(mine + proof[::-1])
        assert rest(first) == b""
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
        while server._server._all:
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
            with connect(f"127.0.0.1:{port}#x", KEY) as link:
                link.send(b"s")
                return link.answer() == b"."

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
            assert waits.recv(7) == b"swift-3"
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
        (0o700, "folder", "a directory"),
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
        secret.find(str(path))
    assert f"--secret-file {path}" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(secret.VARIABLE, raising=False)
    return tmp_path


def test_machines_that_share_a_home_have_one_secret(home: Path) -> None:
    """Those that come first all make one; the first to be whole is the one that all read."""
    for _ in range(10):
        shutil.rmtree(home / ".config", ignore_errors=True)
        with ThreadPoolExecutor(8) as machines:
            found = set(machines.map(lambda _: secret.find(None), range(8)))
        [one] = found
        path = home / ".config/swift-recovery/secret"
        assert one == path.read_bytes().strip()
        assert len(bytes.fromhex(one.decode())) == 32 and path.stat().st_mode & 0o777 == 0o600
        assert list(path.parent.iterdir()) == [path] and secret.find(None) == one


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.chmod(0o640), "can be read by others"),
        (lambda path: path.write_text(""), "must hold 16 to 4096 bytes"),
        (lambda path: path.parent.chmod(0o777), "others can write to"),
        (lambda path: (path.unlink(), path.mkdir()), "a directory"),
        (lambda path: (shutil.rmtree(path.parent), path.parent.write_text("")), "Not a directory|File exists"),
        (lambda path: os.environ.update(HOME="no/home"), "no home folder"),
    ],
)
def test_without_a_secret_there_is_no_job_on_several_machines(
    home: Path, spoil: Callable[[Path], object], says: str
) -> None:
    secret.find(None)
    spoil(Path(secret.OWN).expanduser())
    with pytest.raises(ConfigError, match="Give all the same --secret-file") as error:
        secret.find(None)
    assert re.search(says, str(error.value)) and "\n" not in str(error.value)


#: What the job's worker has, what another user of the machine gets, and where the job listens.
SCRIPT = """
import socket
from shared_core.system import secret
from shared_core.protocol import worker_env
me = worker_env.env()
key = secret.of_job(me.job_dir)
words = []
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and tag in (entry / "environ").read_bytes():
            words += [(entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()]
    except OSError:
        pass
host, port = me.machines[0].partition("#")[0].split(":")
def dial():
    with socket.create_connection((host, int(port)), 10) as sock:
        return sock.recv(7).decode()
def other_user():
    os.setgid(65534)
    os.setuid(65534)
    got = []
    for path in (me.job_dir / secret.FILE, Path(secret.OWN).expanduser(), me.job_dir):
        try:
            os.open(path, os.O_RDONLY)
            got.append(str(path))
        except OSError:
            pass
    return got
stolen = None
if os.geteuid() == 0:
    end, begin = os.pipe()
    if os.fork() == 0:
        try:
            os.write(begin, json.dumps(other_user()).encode())
        finally:
            os._exit(0)
    os.wait()
    stolen = json.loads(os.read(end, 1000))
listeners()
os.write(1, (json.dumps({"key": key.hex(), "hello": dial(), "processes": len(words) // 2, "stolen": stolen,
    "mode": (me.job_dir / secret.FILE).stat().st_mode & 0o777,
    "copies": int(port), "store": int(os.environ["MASTER_PORT"]),
    "shown": any(key in word or key.hex().encode() in word or b"BOUNDARY SECRET" in word for word in words),
}) + "\\n").encode())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can look into."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "given",
    [
        "flag",
        "none",
        "variable",
    ],
)
def test_a_job_on_several_machines(given: str, tmp_path: Path, free_port: int, open_folder: Path) -> None:
    """Its workers have the job's key, from a file that nobody else reads; nothing listens at all interfaces."""
    path = tmp_path / "secret"
    path.write_text("BOUNDARY SECRET BOUNDARY SECRET\n")
    path.chmod(0o600)
    port = free_ports(2)[0]  # a job takes the next one too
    options = ["--nnodes=1", "--spare-nodes=1", f"--rdzv-endpoint=127.0.0.1:{free_port}", "--rdzv-id=job"]
    options.append(f"--port={port}")
    if given == "flag":
        options.append(f"--secret-file={path}")
    env = {secret.VARIABLE: str(path)} if given == "variable" else {}
    env["HOME"] = str(open_folder)
    job = run(tmp_path, LISTENERS + SCRIPT, nproc=1, options=options, env=env)
    assert job.code == 0, job.stderr
    [processes, said] = [json.loads(line) for line in job.stdout.splitlines() if line[:1] in "{["]
    assert {address for each in processes for address in each["at"]} == {"0100007F"}, "127.0.0.1"
    assert (said["store"], said["copies"]) == (port, port + 1)
    assert said["processes"] >= 2 and not said["shown"] and not said["stolen"]
    own = open_folder / ".config/swift-recovery/secret"
    key = secret.derive(own.read_bytes().strip() if given == "none" else path.read_bytes().strip(), "job")
    assert (said["key"], said["mode"], said["hello"]) == (key.hex(), 0o600, "swift-3"), job.stderr

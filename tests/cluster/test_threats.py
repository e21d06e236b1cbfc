"""What others can do to a job on one machine: users of the machine without the job's secret, and processes of the same
user that are none of its workers. ``docs/machines.md#security`` says it in words."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from harness import until
from prelude import PRELUDE
from torch.distributed import TCPStore
from util import ROOT, Job, run, run_forked, start

from tests.support.ports import free_ports

#: User and group of the stranger.
NOBODY = 65534

TRAINING = """
import fcntl, hashlib, os, sys
from pathlib import Path
import torch, torch.distributed as dist
import shared_core
shared_core.install()
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(net.parameters())
job = shared_core.attach(net, optimizer)
rank, gates = dist.get_rank(), int(sys.argv[1])
data = torch.utils.data.TensorDataset(torch.randn(4 * gates, 8))
for epoch in job.epochs(1):
    for step, (x,) in job.steps(torch.utils.data.DataLoader(data, 1)):
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            Path(f"rank{rank}.{step // 4}").write_text(str(os.getpid()))
            with open(f"gate.{step // 4}") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
state = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
os.write(1, f"{rank} {hashlib.sha256(state).hexdigest()}\\n".encode())
"""


def listed() -> list[str]:
    """The keys in the table of ``docs/design/store.md``, as patterns."""
    rows = (ROOT / "docs/design/store.md").read_text().splitlines()
    return [key for row in rows if row.startswith("| ") for key in re.findall(r"`([^`]+)`", row.split("|")[1])]


def names(draw: random.Random) -> Iterator[str]:
    """Keys of the store in the first attempt of a job, one for each pattern."""
    chosen = {"NAME": lambda: draw.choice(["0", "all", "come", "at"]), "[RGNI]": lambda: str(draw.randrange(3))}
    for key in listed():
        for word, choose in chosen.items():
            key = re.sub(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])|(?<=try){word}", lambda _, choose=choose: choose(), key)
        yield key if key.startswith("machines/") else f"swift/0/{key}"
    yield from ("swift/0/checkpoints", "swift/0/session")


def values(draw: random.Random, target: str) -> Iterator[str]:
    """What a stranger would like to be believed, whole and damaged."""
    yield json.dumps({"checkpoint.dir": target, "checkpoint.every_steps": 1, "checkpoint.history": target + "/h"})
    yield json.dumps({"checkpoint.dir": "ftp://127.0.0.1:9/loot", "on_failure": "restart"})
    yield from ('{"rank": 0, "message": "forged"}', '{"reason": "forged"}', "[1]", "[0, 1]", "1", '{"kind": "fail"}')
    whole = json.dumps({"generation": 1, "incarnations": [9, 9], "causes": [], "kind": "form", "failed": [0]})
    yield whole
    at = draw.randrange(len(whole))
    yield whole[:at] + chr(draw.randrange(32, 127)) + whole[at + 1 :]
    yield draw.randbytes(draw.randrange(40)).hex()


def attack(port: int, target: str, seed: int, until_s: float) -> dict[str, int]:
    """Write all there is to write, again and again, to the one port of the job, and try its sockets."""
    draw, wrote, refused = random.Random(seed), 0, 0
    while time.monotonic() < until_s:
        with suppress(RuntimeError):
            store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
            for name in names(draw):
                for value in values(draw, target):
                    store.set(name, value)
                    store.queue_push("swift/0/words/0", name.rpartition("/")[2])
                    wrote += 1
        for agent in [*Path("/dev/shm").glob("swift_*"), *Path("/tmp").glob("swift_*")]:
            with socket.socket(socket.AF_UNIX) as sock:
                try:
                    sock.connect(str(agent / "agent"))
                except OSError:
                    refused += 1
                else:
                    return {"connected": 1}
    return {"wrote": wrote, "refused": refused}


def as_nobody(port: int, target: str, seed: int, until_s: float) -> tuple[int, int]:
    """The attack by another user, in a process of its own; gives its number and where its result will be."""
    end, begin = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(begin, json.dumps(attack(port, target, seed, until_s)).encode())
        finally:
            os._exit(0)
    os.close(begin)
    return child, end


def files_of(folder: Path) -> dict[str, int]:
    """All files below a folder with their sizes."""
    return {str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*"))}


class Gates:
    """Places of the training where it stands until it is let on."""

    def __init__(self, folder: Path, count: int) -> None:
        self._folder = folder
        self._files = [open(folder / f"gate.{n}", "w") for n in range(count)]
        for file in self._files:
            fcntl.flock(file, fcntl.LOCK_EX)

    def reached(self, job: Job, n: int, timeout_s: float = 60.0) -> list[int]:
        """The processes of ranks 0 and 1, once both stand there."""

        def both() -> list[int] | None:
            assert job.process.poll() is None, job.finish().stderr
            texts = [path.read_text() for rank in range(2) if (path := self._folder / f"rank{rank}.{n}").exists()]
            return [int(text) for text in texts] if len(texts) == 2 and all(texts) else None

        found: list[int] = until(both, lambda: f"gate {n}", timeout_s)
        return found

    def open(self, n: int) -> None:
        """Let them on."""
        fcntl.flock(self._files[n], fcntl.LOCK_UN)  # another user's process has it open, too
        self._files[n].close()

    def close(self) -> None:
        """Let them on everywhere."""
        for n, file in enumerate(self._files):
            if not file.closed:
                self.open(n)


def digests(job: Job) -> set[str]:
    return {line for line in job.stdout.splitlines() if line[:2] in ("0 ", "1 ")}


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(
    "seconds", [20.0, pytest.param(1200.0, marks=[pytest.mark.nightly, pytest.mark.timeout(2400)])]
)
def test_another_user_of_the_machine_changes_nothing(seconds: float, tmp_path: Path) -> None:
    """All keys of the store, with values of all kinds, for as long as the job trains and loses workers."""
    seed, count = secrets.randbelow(10**9), 6
    print(f"seed {seed}")
    plain, folder, target = tmp_path / "plain", tmp_path / "job", tmp_path / "target"
    for each in (plain, folder, target):
        each.mkdir()
    target.chmod(0o777)
    Gates(plain, count).close()
    patience = 60.0 + seconds / 4
    expected = digests(run(plain, TRAINING, str(count), timeout=patience))
    assert len(expected) == 2 and len({line[2:] for line in expected}) == 1
    [port] = free_ports(1)
    gates = Gates(folder, count)
    job = start(folder, TRAINING, str(count), options=[f"--master-port={port}"])
    try:
        gates.reached(job, 0, patience)
        begun = time.monotonic()
        before = files_of(tmp_path)
        child, end = as_nobody(port, str(target), seed, begun + seconds)
        for n in range(count):
            pids = gates.reached(job, n, patience)
            until(lambda n=n: time.monotonic() > begun + seconds * (n + 1) / count, lambda: "time", seconds + 60.0)
            if n % 2 == 0:
                os.kill(pids[n // 2 % 2], signal.SIGKILL)
            gates.open(n)
        with open(end, "rb") as file:
            found = json.loads(file.read())
        os.waitpid(child, 0)
    finally:
        gates.close()
        job.finish(patience)
    assert job.code == 0, job.stderr
    assert digests(job) == expected, job.stderr
    assert len(job.of("recovered")) == count // 2, job.stderr
    assert found["wrote"] > 100 and found["refused"] > 0, "control: the attack took place"
    after = files_of(tmp_path)
    made = {name for name in after if name not in before and not name.startswith(("job/rank", "job/gate"))}
    assert made == set() and not list(target.iterdir())
    for word in ("checkpoints go", "forged", "cannot be read and is ignored"):
        assert word not in job.stderr, job.stderr
    job.check_nothing_left()


#: Put before a script: its workers write down which keys they use.
RECORD = """
import os
from pathlib import Path
from shared_core.transport.remote_store import RemoteStore
def record(self, kind, *fields, wait_s=0.0, ask=RemoteStore._ask):
    with open(f"keys.{os.getpid()}", "a") as file:
        keys = fields if kind == b"C" else fields[1:] if kind in b"GP" else fields[:1]
        file.writelines(f"{key}\\n" for key in keys)
    return ask(self, kind, *fields, wait_s=wait_s)
RemoteStore._ask = record
"""


@pytest.mark.nightly
def test_every_key_of_a_job_is_listed(tmp_path: Path) -> None:
    """A job that loses a worker, as its workers see the store."""
    gates = Gates(tmp_path, 2)
    job = start(tmp_path, RECORD + TRAINING, "2")
    try:
        os.kill(gates.reached(job, 0)[1], signal.SIGKILL)
    finally:
        gates.close()
        job.finish()
    assert job.code == 0, job.stderr
    used = {key for path in tmp_path.glob("keys.*") for key in path.read_text().splitlines()}
    parts = {"NAME": "[^/]+", "[RGNI]": "[0-9]+"}
    patterns = []
    for key in listed():
        for word, part in parts.items():
            key = re.sub(rf"(?<![a-zA-Z]){word}(?![a-zA-Z])|(?<=try){word}", part.replace("\\", "\\\\"), key)
        patterns.append(re.compile(f"swift/0/{key}"))
    unlisted = {key for key in used if not any(pattern.fullmatch(key) for pattern in patterns)}
    assert not unlisted and any(key.startswith("swift/0/gen/1/plan") for key in used)


WISHES = """
import subprocess
if me.incarnation == 0 and me.rank == 0:
    wish = "from shared_core.worker import link; from shared_core.protocol import worker_env; "
    wish += "link.wish({'checkpoint.dir': sys.argv[1]}, worker_env.env())"
    subprocess.run([sys.executable, "-c", "import sys; " + wish, sys.argv[1] + "/of_a_child"], check=True)
    link.wish({"on_failure": "restart"}, me)
    link.wish({"checkpoint.keep": "many"}, me)
    link.wish({"checkpoint.dir": sys.argv[1] + "/mine"}, me)
    reach("wished")
await_("wished", 0)
if me.rank == 1:
    if me.incarnation == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    show(dir=me.config.checkpoint.dir, on_failure=me.config.on_failure, keep=me.config.checkpoint.keep)
"""


def test_wishes_are_those_of_workers_and_about_checkpoints(tmp_path: Path) -> None:
    """The agent asks the kernel who is at the other end of its socket."""
    job = run_forked(tmp_path, PRELUDE + WISHES, str(tmp_path))
    assert job.code == 0, job.stderr
    [shown] = [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]
    assert shown["dir"] == f"{tmp_path}/mine" and shown["on_failure"] == "replace" and shown["keep"] < 100
    assert job.stderr.count("is no worker of this machine") == 1, job.stderr
    assert job.stderr.count("on_failure is not for a script to say") == 1, job.stderr
    assert job.stderr.count("the checkpoint options that a worker reported are ignored") == 3, job.stderr

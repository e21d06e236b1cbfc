"""Jobs on several machines of which the user has said nothing about a secret, and another user who reaches all ports.

The machines are agents at 127.0.0.1.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from harness import until
from keeping import HEAD, rest
from torch.distributed import TCPStore
from util import Job, start_command

pytestmark = pytest.mark.nightly

TRAINING = """
import fcntl
import os
from pathlib import Path
import torch, torch.distributed as dist
import shared_core
shared_core.install()
dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(net.parameters())
job = shared_core.attach(net, optimizer)
for epoch in job.epochs(1):
    for step, (x,) in job.steps(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(80, 4)), 2)):
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20:
            Path(f"rank{dist.get_rank()}").touch()
            with open("../gate") as gate:
                fcntl.flock(gate, fcntl.LOCK_SH)
"""


class Agents:
    """Launchers of one job, each in a folder of its own."""

    def __init__(self, folder: Path, endpoint: str, homes: list[Path], *options: str) -> None:
        self.folder = folder
        self.jobs: list[Job] = []
        self._gate = open(folder / "gate", "w")
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        for place, home in enumerate(homes):
            here = folder / str(place)
            here.mkdir()
            (here / "train.py").write_text(TRAINING)
            command = [sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node=1", "--events=events.jsonl"]
            command += [f"--rdzv-endpoint={endpoint}", f"--rdzv-id={folder.name}", "--nnodes=2", *options, "train.py"]
            with open(here / "stderr", "wb") as file:
                self.jobs.append(start_command(here, command, {"HOME": str(home)}, stderr=file))

    def said(self, place: int) -> str:
        """What an agent has said so far."""
        return (self.folder / str(place) / "stderr").read_text()

    def until(self, what: Callable[[], object]) -> Any:
        """Wait for something; gives it."""
        return until(what, lambda: "\n".join(map(self.said, range(len(self.jobs)))), 60.0)

    def trains(self) -> bool:
        """Whether both ranks stand in the middle of the training."""
        return len(list(self.folder.glob("*/rank*"))) == 2

    def go(self) -> None:
        """Let them end."""
        self._gate.close()

    def close(self) -> None:
        """End what is left."""
        self._gate.close()
        for job in self.jobs:
            if job.process.poll() is None:
                job.process.kill()
            job.process.communicate()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users can look into."""
    with tempfile.TemporaryDirectory(prefix="st-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def as_nobody(what: Callable[[], Any]) -> Any:
    """What a function gives that another user calls."""
    "localhost".encode("idna")  # connecting imports it, and the other user may not read where Python lies
    end, begin = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(begin, json.dumps(what()).encode())
        except Exception as error:
            os.write(begin, json.dumps(traceback.format_exception(error)).encode())
        finally:
            os._exit(0)
    os.close(begin)
    with open(end, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return json.loads(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_user_gets_nothing(shared: Path, tmp_path: Path, free_port: int) -> None:
    """From the list of processes to the rendezvous, from there to all ports where agents answer each other; and then a
    machine fails."""
    own = shared / ".config/swift-recovery/secret"
    folder = tmp_path / "strange"
    folder.mkdir()

    def attack() -> dict[str, Any]:
        lines = subprocess.run(["ps", "-ewwo", "args"], capture_output=True, text=True).stdout.splitlines()
        line = next(line.split() for line in lines if "--rdzv-id=strange" in line)
        endpoint, name = (
            word.partition("=")[2] for word in line if word.startswith(("--rdzv-endpoint=", "--rdzv-id="))
        )
        host, port = endpoint.split(":")
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
        key = f"torch.rendezvous.{name}"
        document = json.loads(base64.b64decode(store.get(key)))
        got = []
        for member in document["members"]:
            place = member["name"].partition("#")[0].split(":")
            for kind, data in ((b"g", b""), (b"L", b"{}"), (b"P", b"{}"), (b"w", b"forged"), (b"e", b""), (b"K", b"")):
                with socket.create_connection((place[0], int(place[1])), 10.0) as sock:
                    sock.sendall(os.urandom(64) + HEAD.pack(kind, 1, 0, 0, len(data)) + data)
                    answer = rest(sock)
                    got.append(answer[:7].decode() + str(len(answer)))
        opened = []
        for path in (own, *Path("/dev/shm").glob("swift_*/*")):
            try:
                opened.append(path.read_bytes().hex())
            except OSError:
                pass
        return {"got": got, "opened": opened}

    with ExitStack() as stack:
        agents = Agents(folder, f"127.0.0.1:{free_port}", [shared] * 3, "--spare-nodes=1", "--lease=1")
        stack.callback(agents.close)
        agents.until(agents.trains)
        found = as_nobody(attack)
        assert found == {"got": ["swift-3" + "39"] * 12, "opened": []}
        spare = agents.until(lambda: [place for place in range(3) if "waits as a spare" in agents.said(place)])[0]
        [failed] = [int(path.parent.name) for path in folder.glob("*/rank1")]  # the other one hosts the store
        os.kill(agents.jobs[failed].process.pid, signal.SIGKILL)
        agents.until(lambda: "takes over rank 1" in agents.said(spare))
        agents.go()
        left = [agents.jobs[place] for place in range(3) if place != failed]
        assert [job.process.wait(60.0) for job in left] == [0, 0], agents.said(spare)
        assert "0 steps lost (its machine failed" in agents.said(spare)


def test_machines_with_different_secrets_do_not_work_together(shared: Path, tmp_path: Path, free_port: int) -> None:
    """Nothing that reaches one from the other could be believed."""
    homes = [shared / "a", shared / "b"]
    for home in homes:
        home.mkdir()
    with ExitStack() as stack:
        agents = Agents(tmp_path, f"127.0.0.1:{free_port}", homes, "--rdzv-conf=join_timeout=20")
        stack.callback(agents.close)
        codes = [job.process.wait(60.0) for job in agents.jobs]
        assert 2 in codes and 0 not in codes, agents.said(0)
        assert sum("has another secret than this one" in agents.said(place) for place in range(2)) == 1
        assert not list(tmp_path.glob("*/rank*"))

"""gloo on a machine that others use too: who is at the other end of a connection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: A user that owns nothing here.
NOBODY = 65534

CONNECT = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
from shared_core.worker.comm import gloo
from shared_core.worker.comm.gloo import InnerGroup
rank, port, user = map(int, sys.argv[1:])
os.environ |= {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
if user:
    os.setresuid(user, user, user)
    gloo.unknown = lambda connections: 0  # it does not mind who it talks to
try:
    group = InnerGroup.connect(  # closed only after both have tried
        store, rank, range(2), operation_timeout=timedelta(seconds=20), connect_timeout_s=10.0, wait_timeout_s=20.0,
        abandoned=lambda: False, what="the group",
    )
    print("connected", flush=True)
except Exception as error:
    print(f"{type(error).__name__}: {error}", flush=True)
store.set(f"tried{rank}", "")
store.wait(["tried0", "tried1"])
os._exit(0)
"""


@pytest.mark.parametrize("stranger", [pytest.param(None, marks=pytest.mark.nightly), 0])
def test_another_user_takes_no_place(stranger: int | None) -> None:
    """Whether it listens or connects: nothing is sent to it."""
    from torch.distributed import TCPStore

    if stranger is not None and os.geteuid():
        pytest.skip("only root can become another user")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECT, str(rank), str(store.port), str(NOBODY * (rank == stranger))],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    if stranger is None:
        assert said == ["connected"] * 2
    else:
        assert said[1 - stranger].startswith("RecoveryFailed") and f"user {NOBODY}" in said[1 - stranger], said


GONE = """
import os, threading
from datetime import timedelta
from torch.distributed import HashStore
from shared_core.errors import GenerationAbandoned
from shared_core.worker.comm.gloo import InnerGroup

class Silent:  # its owner says where it listens, and nothing more
    def __init__(self, inner, said): self.inner, self.said = inner, said
    def __getattr__(self, name): return getattr(self.inner, name)
    def check(self, keys): self.said.set(); threading.Event().wait()

def connect(rank, store, said):
    return InnerGroup.connect(
        store, rank, range(2), operation_timeout=timedelta(seconds=100), connect_timeout_s=100.0, wait_timeout_s=100.0,
        abandoned=said.is_set, what="the group",
    )

for _ in range(30):  # which of the two connects to the other depends on their ports
    store, said = HashStore(), threading.Event()
    threading.Thread(target=connect, args=(1, Silent(store, said), said), daemon=True).start()
    try:
        connect(0, store, said)
    except GenerationAbandoned:
        print("given up", flush=True)
        break
os._exit(0)
"""


def test_a_member_that_does_not_answer_is_given_up_with_its_generation() -> None:
    """gloo itself would try for minutes."""
    done = subprocess.run(
        [sys.executable, "-c", GONE],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == "given up\n", done.stderr

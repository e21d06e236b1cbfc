"""Runs torch's own suite for backends, on plain gloo and over this product, and prints what passes where.

    python -m tests.suites.torch_backends [--only WORD] [--processes 4] [--kill]

All tests that pass on plain gloo on a CPU must pass here. The suite needs ``expecttest``.

``--kill``: one worker dies by SIGKILL at the first step boundary of each test that has one, and the test must pass
still. The suite attaches nothing, and a job that attaches nothing trains as stock and has no step boundary: the table
names the tests that train so. A control that does attach shows that a worker would have died.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared_core.faults import ANY_STEP, Fault
from tests.support.processes import MARK, kill_marked

ROOT = Path(__file__).resolve().parents[2]
#: A test of the worker's own: it trains what it has attached.
CONTROL = "test_control_with_a_step_boundary"
KILL = Fault(1, ANY_STEP, "step_boundary", "SIGKILL")
#: A test that lasts longer has failed, and a job whose processes import for longer, in seconds; and how long the other
#: ranks may take when one has ended a test.
_LONGEST_S, _LONGEST_START_S, _OTHERS_S = 150.0, 600.0, 60.0


@dataclass(frozen=True)
class Outcome:
    """How a test has ended in all ranks.

    Attributes:
        how: passed, skipped or failed.
        why: of the first rank that did not pass.
        trains: whether a ``DistributedDataParallel`` module is trained in it.
        killed: whether a worker was killed in it, and replaced.
    """

    how: str
    why: str = ""
    trains: bool = False
    killed: bool = False


Outcomes = dict[str, Outcome]


def names(only: str = "") -> list[str]:
    """Tests of the suite."""
    os.environ.update({"BACKEND": "gloo", "WORLD_SIZE": "4", "TEMP_DIR": tempfile.gettempdir()})
    from torch.testing._internal.distributed.distributed_test import DistributedTest

    suite = DistributedTest._DistTestBase
    return [name for name in sorted(dir(suite)) if name.startswith("test_") and only in name]


def run(tests: Sequence[str], *, stock: bool, processes: int = 4, kill: bool = False) -> Outcomes:
    """How each test ends.

    Args:
        tests: their names.
        stock: on plain gloo, without this product.
        processes: workers of each job.
        kill: a worker at the first step boundary of each test.
    """
    found: Outcomes = {}
    while len(found) < len(tests):
        left = [name for name in tests if name not in found]
        # Members that fail a monitored barrier have begun one collective more than those that did not come, on plain
        # gloo too: what follows such a test in its processes is another program in each rank.
        alone = [name for name in left if "monitored_barrier" in name]
        left = [name for name in left if name not in alone] or alone[:1]
        with tempfile.TemporaryDirectory(prefix="torch-backends-") as folder:
            heard, tail = _job(left, Path(folder), stock=stock, processes=processes, kill=kill)
        found |= heard.outcomes
        if not heard.stopped:
            found[left[len(heard.outcomes)]] = Outcome("failed", f"the job ended, or the test hangs:\n{tail}")
    return found


@dataclass
class Heard:
    """What the workers of one job have said.

    Attributes:
        outcomes: of the tests that all ranks have ended.
        stopped: the job was to end where it did: no test is left, ranks differ in one, or a worker was replaced in it.
    """

    outcomes: Outcomes = field(default_factory=dict)
    stopped: bool = False


def _job(tests: Sequence[str], folder: Path, *, stock: bool, processes: int, kill: bool) -> tuple[Heard, str]:
    """Run tests until there is a reason to stop. Returns what was heard, and the last output."""
    for name in ("barrier", "test_dir"):
        (folder / name).mkdir()
    (folder / "tests.json").write_text(json.dumps(list(tests)))
    mark = os.environ.get(MARK, "") + uuid.uuid4().hex[:8]
    env = {key: value for key, value in os.environ.items() if not key.startswith("SWIFT_")}
    env |= {"BACKEND": "gloo", "TEMP_DIR": str(folder), "OMP_NUM_THREADS": "1", MARK: mark}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if stock:
        env["SWIFT_BASELINE"] = "1"
        launcher = ["torch.distributed.run", "--standalone"]
    else:
        launcher = ["shared_core.cli.swiftrun", "--standbys=0", f"--events={folder / 'events.jsonl'}"]
    if kill:
        (folder / "faults.json").write_text(json.dumps([KILL.to_dict()]))
        launcher.append(f"--faults={folder / 'faults.json'}")
    worker = str(Path(__file__).with_name("torch_backends_worker.py"))
    command = [sys.executable, "-m", *launcher, f"--nproc-per-node={processes}", worker, str(folder / "tests.json")]
    with (folder / "output").open("wb") as output, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "runner"))
        listener.listen()
        job = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        try:
            heard = _hear(listener, job, tests, processes)
        finally:
            kill_marked(mark)
            job.wait()
    return heard, (folder / "output").read_text(errors="replace")[-1500:]


def _hear(listener: socket.socket, job: subprocess.Popen[bytes], tests: Sequence[str], processes: int) -> Heard:
    """What the workers say until the job ends, or one of them says nothing for too long."""
    heard = Heard()
    said: dict[int, Mapping[str, object]] = {}
    connections: list[socket.socket] = []
    replaced = False
    deadline = time.monotonic() + _LONGEST_START_S
    ended = os.pidfd_open(job.pid)
    with selectors.DefaultSelector() as waiting:
        waiting.register(ended, selectors.EVENT_READ)
        waiting.register(listener, selectors.EVENT_READ)
        while ready := waiting.select(deadline - time.monotonic()):
            if any(key.fd == ended for key, _ in ready):
                break
            for key, _ in ready:
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    replaced |= len(connections) >= processes
                    connections.append(connection)
                    waiting.register(connection, selectors.EVENT_READ, connection.makefile("rb"))
                    _send(connection, len(heard.outcomes))
                elif line := key.data.readline():
                    one = json.loads(line)
                    said[one["rank"]] = one
                    deadline = min(deadline, time.monotonic() + _OTHERS_S)
                else:  # it has ended
                    waiting.unregister(key.fileobj)
            if len(said) == processes:
                outcome = _together([said[rank] for rank in range(processes)], replaced)
                heard.outcomes[tests[len(heard.outcomes)]] = outcome
                apart = len({one["how"] for one in said.values()}) > 1
                heard.stopped = apart or replaced or len(heard.outcomes) == len(tests)
                for connection in connections:
                    _send(connection, not heard.stopped)
                said, deadline = {}, time.monotonic() + _LONGEST_S
    os.close(ended)
    for connection in connections:
        connection.close()
    return heard


def _send(connection: socket.socket, what: object) -> None:
    try:
        connection.sendall(json.dumps(what).encode() + b"\n")
    except OSError:
        pass  # that worker has ended, which is seen elsewhere


def _together(said: Sequence[Mapping[str, object]], replaced: bool) -> Outcome:
    """How a test has ended, from how it has in each rank."""
    trains = any(one["trains"] for one in said)
    for how in ("failed", "skipped"):
        for one in said:
            if one["how"] == how:
                return Outcome(how, str(one["why"]), trains, replaced)
    return Outcome("passed", "", trains, replaced)


def table(stock: Outcomes, here: Outcomes, *, kill: bool = False) -> str:
    """What passes on plain gloo, and how it ends here."""
    passing = {name: here[name] for name in stock if stock[name].how == "passed"}
    rows = [f"{name:70} {one.how:8}{_boundary(one) if kill else ''}".rstrip() for name, one in passing.items()]
    counts = Counter(one.how for one in passing.values())
    told = ", ".join(f"{number} {how}" for how, number in sorted(counts.items()))
    last = [f"{len(rows)} tests pass on plain gloo; here: {told}"]
    if kill:
        trains = sum(one.trains for one in passing.values())
        killed = sum(one.killed for one in passing.values())
        last.append(f"{killed} have a step boundary, at which a worker was killed; {trains} train a DDP module")
    return "\n".join([*rows, *last])


def _boundary(one: Outcome) -> str:
    if one.killed:
        return "a worker killed at a step boundary"
    return "trains a DDP module; nothing is attached: no step boundary" if one.trains else ""


def main() -> int:
    """Run the suite; the exit status is 1 if a test that passes on plain gloo does not here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the tests to run")
    parser.add_argument("--processes", type=int, default=4, help="workers of each job")
    parser.add_argument("--kill", action="store_true", help="a worker at the first step boundary of each test")
    args = parser.parse_args()
    stock = run(names(args.only), stock=True, processes=args.processes)
    passing = [name for name, one in stock.items() if one.how == "passed"]
    here = run(passing, stock=False, processes=args.processes, kill=args.kill)
    print(table(stock, here, kill=args.kill))
    failed = {name: here[name] for name in passing if here[name].how != "passed"}
    if args.kill:
        control = run([CONTROL], stock=False, processes=args.processes, kill=True)[CONTROL]
        print(f"control, with a model that is attached: {control.how}, {_boundary(control) or 'no worker killed'}")
        failed |= {} if control.how == "passed" and control.killed else {CONTROL: control}
    for name, one in failed.items():
        print(f"\n--- {name}: {one.how}\n{one.why}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""``swiftrun`` with real processes: normal ends and failures."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from prelude import PRELUDE, shown
from util import ROOT, run

from shared_core.cli.swiftrun import _one_thread_each


@pytest.mark.nightly
def test_normal_end_looks_like_torchrun(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
import atexit, random
import torch
atexit.register(lambda: print("exit handler of rank", me.rank, flush=True))
show(rank=me.rank, argv=sys.argv[1:], path=sys.path[0], file=__file__, world=me.world_size, draw=random.random(),
     pgid=os.getpgid(0) == os.getpid(), restart=os.environ["TORCHELASTIC_RESTART_COUNT"],
     agent=os.environ["TORCHELASTIC_USE_AGENT_STORE"],
     threads=torch.get_num_threads(), seed=torch.initial_seed(), first=torch.rand(1).item(), name=__name__,
     main=sys.modules["__main__"].__dict__ is globals(), tag=bool(os.environ["SWIFT_TEST_TAG"]), hash=hash("x"))
print("to stderr", me.rank, file=sys.stderr)
"""
    )
    job = run(tmp_path, script, "--epochs", "3", options=["-t", "3", "--log-dir", str(tmp_path / "logs")])
    assert job.code == 0, job.stderr
    lines = sorted(line for line in job.stdout.splitlines() if "exit handler" in line)
    assert lines == ["[default0]:exit handler of rank 0", "[default1]:exit handler of rank 1"]
    assert "[default1]:to stderr 1" in job.stderr.splitlines()
    seen = [json.loads(line.partition(":")[2]) for line in job.stdout.splitlines() if "argv" in line]
    assert sorted(one["rank"] for one in seen) == [0, 1]
    for one in seen:
        assert one["argv"] == ["--epochs", "3"]
        assert (one["path"], one["file"]) == (str(tmp_path), str(tmp_path / "script.py"))
        assert one["world"] == 2 and one["pgid"] and one["main"] and one["tag"] and one["name"] == "__main__"
        assert (one["restart"], one["agent"]) == ("0", "True")
        assert one["threads"] == 1
    for name in ("draw", "seed", "first"):  # generators are seeded as in fresh interpreters: at random
        assert seen[0][name] != seen[1][name]
    assert seen[0]["hash"] == seen[1]["hash"]
    assert len(list(tmp_path.glob("logs/*/attempt_0/[01]/std*.log"))) == 4
    assert [event.kind for event in job.events] == ["start", "end"]


@pytest.mark.nightly
def test_options_that_only_the_script_says(tmp_path: Path) -> None:
    """Those that the job goes by from its start must have been told to the launcher, whose word wins."""
    (tmp_path / "swift.json").write_text('{"detection.connect_timeout_s": 6}')
    script = """
import shared_core
from shared_core.config import SwiftConfig
job = shared_core.install()
said = {"data": "seeded", "seed": 3, "detection.connect_timeout_s": 7, "on_failure": "replace"}
job.options.check_told(said)
config = SwiftConfig.from_env(base=SwiftConfig.from_dict(said))
assert (config.data, config.seed, config.detection.connect_timeout_s) == ("seeded", 3, 6.0), config
job.options.check_told({"detection.wait_timeout_s": 7})
"""
    job = run(tmp_path, script, nproc=1, options=[f"--swift-config={tmp_path / 'swift.json'}", "--crash-loop=1"])
    assert job.code != 0 and "detection.wait_timeout_s=7.0 is set in the script alone" in job.stderr, job.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("mistake", [False, True])
def test_threads_that_wait_for_a_peer_at_the_end_abort_nobody(tmp_path: Path, mistake: bool) -> None:
    """The interpreter would end them with C++ on their stacks, which mostly aborts one worker of three, and now and
    then hides the mistake that a worker has ended with.
    """
    script = """
import os, select, threading
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
def wait():
    with open(f"waits{rank}", "w"):
        dist.recv(torch.ones(1), src=(rank + 1) % 3)
for _ in range(3):
    threading.Thread(target=wait, daemon=True).start()
dist.barrier()
print(f"ends {rank}", end="")
class Late:
    def __init__(self, peer):
        self.peer, self.select = os.pidfd_open(peer), select.select
    def __del__(self):
        self.select([self.peer], [], [], 20)
"""
    if mistake:
        mistakes = """
pids = [None] * 3
dist.all_gather_object(pids, os.getpid())
late = Late(pids[1]) if rank == 0 else None
if rank == 2:
    dist.barrier()
raise ValueError("a mistake")
"""
        job = run(tmp_path, script + mistakes, nproc=3, options=["--max-restarts=1"])
        causes = [str(event.fields["cause"]).partition(" (at")[0] for event in job.of("failed")]
        assert job.code != 0 and causes == ["ValueError: a mistake"] * 2, job.stderr
    else:
        job = run(tmp_path, script, nproc=3)
        assert job.code == 0 and "had finished its work" not in job.stderr, job.stderr
    assert all(f"ends {rank}" in job.stdout for rank in range(3)), "what is printed last is not lost"


def test_a_failed_worker_is_replaced_and_its_siblings_stay(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """Three kinds of failure in one job; rank 0 lives through all of them. A child in the failed worker's group dies
    with it, one in a session of its own at the end. Latencies are recorded, not asserted.
    """
    script = (
        PRELUDE
        + """
from shared_core.waiting import Wait, poll
reach(f"up{me.incarnation}")
if me.rank == 0:
    show(pid=os.getpid(), started=open("/proc/self/stat").read().split()[21])
    pid = await_("up0", 1)
    # as a user would
    ours = ["pgrep", "--parent", str(os.getppid())]
    found = subprocess.run([*ours, "-f", "swift rank 1: .*script.py --lr 0.1"], capture_output=True, text=True).stdout
    show(found=found.split() == [str(pid)], named=subprocess.getoutput(f"ps -o comm= -p {pid}"),
         standby=subprocess.getoutput(" ".join([*ours, "-f", "-a", "'swift standby: .*script.py'"])))
    child, killed = int(store.get("test/child")), time.time()
    os.kill(int(found), signal.SIGKILL)
    show(gen=generation(1), told_s=time.time() - killed)
    await_("up1", 1)
    show(replacement_s=time.time() - killed)
    gone = lambda: not os.path.exists(f"/proc/{child}")
    poll(gone, lambda: False, Wait("the test", "the child of the failed worker to end", 20.0))
    reach("exit")
    show(gen=generation(2))
    await_("up2", 1)
    os.kill(await_("up0", 2), signal.SIGSTOP)
    show(gen=generation(3))
    os.kill(await_("up1", 2), signal.SIGTERM)
    show(gen=generation(4))
    await_("up2", 2)
    show(pid=os.getpid(), started=open("/proc/self/stat").read().split()[21])
elif me.rank == 1 and me.incarnation < 2:
    if me.incarnation == 1:
        await_("exit", 0)
        os._exit(0)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    store.set("test/child", str(subprocess.Popen(["sleep", "600"]).pid))
    signal.pause()
elif me.rank == 2 and me.incarnation < 2:
    signal.pause()
show(rank=me.rank, incarnation=me.incarnation, generation=me.generation)
"""
    )
    job = run(tmp_path, "import subprocess" + script, "--lr", "0.1", nproc=3)
    assert job.code == 0, job.stderr
    said = shown(job)
    for name, value in ((name, one[name]) for one in said for name in ("told_s", "replacement_s") if name in one):
        record_property(name, value)
        print(f"{name}: {1e3 * value:.1f} ms")
    [titles] = [one for one in said if "found" in one]
    assert titles["found"] and titles["named"] == "swift rank 1" and "swift standby: " in titles["standby"], titles
    own = [one for one in said if "pid" in one]
    assert len(own) == 2 and own[0] == own[1]
    gens = [one["gen"] for one in said if "gen" in one]
    assert [gen["generation"] for gen in gens] == [1, 2, 3, 4]
    assert [gen["failed"] for gen in gens] == [[1], [1], [2], [2]]
    assert gens[-1]["incarnations"] == [0, 2, 2]
    assert [next(iter(gen["cause"].values())) for gen in gens] == [
        "killed by SIGKILL",
        "exited with code 0 without saying goodbye",
        "stopped (SIGSTOP), killed by the agent",
        "killed by SIGTERM",
    ]
    ends = sorted((one["rank"], one["incarnation"], one["generation"]) for one in said if "incarnation" in one)
    assert ends == [(0, 0, 0), (1, 2, 2), (2, 2, 4)]
    assert [event.rank for event in job.of("failed")] == [1, 1, 2, 2]
    assert [event.generation for event in job.of("generation")] == [1, 2, 3, 4]
    replacements = job.of("replacement_start")
    assert [event.fields["incarnation"] for event in replacements] == [1, 2, 1, 2]
    assert all(event.fields["how"] == "standby" for event in replacements)
    assert job.of("end")[0].fields.items() >= {"result": "succeeded", "replaced": 4}.items()
    assert "ranks 1 and 2 are back after" in job.stderr and "killed by SIGTERM; now pid" in job.stderr, job.stderr


def test_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's choice, without its banner."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _one_thread_each(2) == "" and os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _one_thread_each(1) == "" and "OMP_NUM_THREADS" not in os.environ
    assert _one_thread_each(2) == "1 thread each, as OMP_NUM_THREADS is not set"
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.nightly
def test_a_forked_worker_is_as_a_fresh_interpreter(tmp_path: Path) -> None:
    """What modules fixed at their import in the standby is set right; a standby that holds threads is told of once."""
    (tmp_path / "early.py").write_text(
        "import threading, random, numpy, torch\n"
        "from lightning_utilities.core.rank_zero import rank_zero_only\n"
        "rank_zero_only.rank = 0\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "here = threading.get_ident()\n"
    )
    script = (
        PRELUDE
        + """
import early, numpy, random, signal, threading, torch
from lightning_utilities.core.rank_zero import rank_zero_only
kept = sorted(name for name in os.environ if name.endswith("_NUM_THREADS"))
show(rank=me.rank, zero=rank_zero_only.rank, draws=[random.random(), numpy.random.rand(), torch.rand(1).item()],
     threads=torch.get_num_threads(), kept=kept, live=threading.active_count(), main=threading.main_thread().is_alive(),
     int=signal.getsignal(signal.SIGINT) is signal.default_int_handler, term=signal.getsignal(signal.SIGTERM) == 0,
     stdin=sys.stdin.read(), main_module=sys.modules["__main__"].__name__, cwd=os.getcwd())
"""
    )
    paths = f"{ROOT}{os.pathsep}{tmp_path}"
    env = {"OMP_NUM_THREADS": "2", "PYTHONPATH": paths}
    job = run(tmp_path, script, options=["--preload", "early,no_such_module"], env=env)
    assert job.code == 0, job.stderr
    seen = sorted(shown(job), key=lambda one: one["rank"])
    assert [one["zero"] for one in seen] == [0, 1]
    assert all(mine != theirs for mine, theirs in zip(seen[0]["draws"], seen[1]["draws"], strict=True))
    for one in seen:
        assert (one["threads"], one["kept"], one["live"]) == (2, ["OMP_NUM_THREADS"], 1)
        assert one["main"] and one["int"] and one["term"] and one["stdin"] == "" and one["cwd"] == str(tmp_path)
    assert job.stderr.count("the standby holds 2 threads") == 1


@pytest.mark.nightly
def test_goodbye_is_not_final_before_all_have_said_it(tmp_path: Path) -> None:
    """A worker that fails while it waits for its peers is replaced, and says goodbye again."""
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    pid = await_("up0", 1)
    store.wait([me.prefix + "done/1"], 40)
    os.kill(pid, signal.SIGKILL)
    generation(1)
    await_("up1", 1)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 0, job.stderr
    assert [event.rank for event in job.of("failed")] == [1]

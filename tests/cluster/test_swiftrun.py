"""``swiftrun`` with real processes: normal ends, losses, crash loops, signals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from util import ROOT, Job, run, start, start_command, tagged

from shared_core.cli.job_options import build_config
from shared_core.cli.swiftrun import _one_thread_each, parse_args

#: Ranks meet at keys of the store, so that a script knows when the others have come to a place.
PRELUDE = """
import json, os, signal, sys, time
from datetime import timedelta
from shared_core.worker import link
from shared_core.protocol import progress_file
from shared_core.protocol import worker_env
from shared_core.protocol.generation import Entry
me = worker_env.env()
store = link.connect_store()
def reach(name, rank=None):
    store.set(f"test/{name}/{me.rank if rank is None else rank}", str(os.getpid()))
def await_(name, rank):
    store.wait([f"test/{name}/{rank}"], timedelta(seconds=40))
    return int(store.get(f"test/{name}/{rank}"))
def generation(g):
    store.wait([me.prefix + f"gen/{g}"], timedelta(seconds=40))
    entry = Entry.from_json(store.get(me.prefix + f"gen/{g}"), g, me.world_size)
    return {"generation": entry.generation, **entry.event_fields()}
def show(**fields):
    os.write(1, (json.dumps(fields) + "\\n").encode())  # whole: others write to the same pipe
"""


def shown(job: Job) -> list[dict]:
    """What the script printed with ``show``."""
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]


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
        causes = [str(event.fields["cause"]).partition(" (at")[0] for event in job.of("lost")]
        assert job.code != 0 and causes == ["ValueError: a mistake"] * 2, job.stderr
    else:
        job = run(tmp_path, script, nproc=3)
        assert job.code == 0 and "after its goodbye" not in job.stderr, job.stderr
    assert all(f"ends {rank}" in job.stdout for rank in range(3)), "what is printed last is not lost"


def test_a_lost_worker_is_replaced_and_its_siblings_stay(tmp_path: Path) -> None:
    """Three kinds of loss in one job; rank 0 lives through all of them."""
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    show(pid=os.getpid(), started=open("/proc/self/stat").read().split()[21])
    pid = await_("up0", 1)
    # as a user would
    ours = ["pgrep", "--parent", str(os.getppid())]
    found = subprocess.run([*ours, "-f", "swift rank 1: .*script.py --lr 0.1"], capture_output=True, text=True).stdout
    show(found=found.split() == [str(pid)], named=subprocess.getoutput(f"ps -o comm= -p {pid}"),
         standby=subprocess.getoutput(" ".join([*ours, "-f", "-a", "'swift standby: .*script.py'"])))
    os.kill(int(found), signal.SIGKILL)
    show(gen=generation(1))
    await_("up1", 1)
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
    signal.pause()
elif me.rank == 2 and me.incarnation < 2:
    signal.pause()
show(rank=me.rank, incarnation=me.incarnation, generation=me.generation)
"""
    )
    job = run(tmp_path, "import subprocess" + script, "--lr", "0.1", nproc=3)
    assert job.code == 0, job.stderr
    said = shown(job)
    [titles] = [one for one in said if "found" in one]
    assert titles["found"] and titles["named"] == "swift rank 1" and "swift standby: " in titles["standby"], titles
    own = [one for one in said if "pid" in one]
    assert len(own) == 2 and own[0] == own[1]
    gens = [one["gen"] for one in said if "gen" in one]
    assert [gen["generation"] for gen in gens] == [1, 2, 3, 4]
    assert [gen["lost"] for gen in gens] == [[1], [1], [2], [2]]
    assert gens[-1]["incarnations"] == [0, 2, 2]
    assert [next(iter(gen["cause"].values())) for gen in gens] == [
        "killed by SIGKILL",
        "exited with code 0 without saying goodbye",
        "stopped (SIGSTOP), killed by the agent",
        "killed by SIGTERM",
    ]
    ends = sorted((one["rank"], one["incarnation"], one["generation"]) for one in said if "incarnation" in one)
    assert ends == [(0, 0, 0), (1, 2, 2), (2, 2, 4)]
    assert [event.rank for event in job.of("lost")] == [1, 1, 2, 2]
    assert [event.generation for event in job.of("generation")] == [1, 2, 3, 4]
    newcomers = job.of("newcomer_start")
    assert [event.fields["incarnation"] for event in newcomers] == [1, 2, 1, 2]
    assert all(event.fields["how"] == "standby" for event in newcomers)
    assert job.of("end")[0].fields == {"result": "succeeded", "replaced": 4}
    assert "ranks 1 and 2 are back after" in job.stderr and "killed by SIGTERM; now pid" in job.stderr, job.stderr


def test_losses_are_noticed_fast_and_reach_the_worker_group(
    tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    """Latencies are recorded, not asserted. A child in the lost worker's group dies with it, others at the end."""
    script = (
        PRELUDE
        + """
import subprocess
reach(f"up{me.incarnation}")
if me.rank == 1:
    if me.incarnation == 0:
        child = subprocess.Popen(["sleep", "600"])
        away = subprocess.Popen(["sleep", "600"], start_new_session=True)
        reach("child", child.pid)
        store.set("test/child", str(child.pid))
        signal.pause()
else:
    pid = await_("up0", 1)
    child = int(store.get("test/child"))
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    generation(1)
    show(told_s=time.time() - killed)
    await_("up1", 1)
    show(newcomer_s=time.time() - killed)
    while os.path.exists(f"/proc/{child}"):
        os.sched_yield()
"""
    )
    job = run(tmp_path, script)
    assert job.code == 0, job.stderr
    for one in shown(job):
        for name, value in one.items():
            record_property(name, value)
            print(f"{name}: {1e3 * value:.1f} ms")


def test_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's choice, without its banner."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert _one_thread_each(2) == "" and os.environ["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert _one_thread_each(1) == "" and "OMP_NUM_THREADS" not in os.environ
    assert _one_thread_each(2) == "1 thread each, as OMP_NUM_THREADS is not set"
    assert os.environ["OMP_NUM_THREADS"] == "1"


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


def test_goodbye_is_not_final_before_all_have_said_it(tmp_path: Path) -> None:
    """A worker that is lost while it waits for its peers is replaced, and says goodbye again."""
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    pid = await_("up0", 1)
    store.wait([me.prefix + "done/1"], timedelta(seconds=40))
    os.kill(pid, signal.SIGKILL)
    generation(1)
    await_("up1", 1)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 0, job.stderr
    assert [event.rank for event in job.of("lost")] == [1]


def test_without_standbys_workers_are_fresh_interpreters(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    os.kill(await_("up0", 1), signal.SIGKILL)
    await_("up1", 1)
elif me.incarnation == 0:
    signal.pause()
show(rank=me.rank, name=__name__, path=sys.path[0], group=os.getpgid(0) == os.getpid(), argv=sys.argv[1:])
"""
    )
    job = run(tmp_path, script, "a b", options=["--standbys", "0", "-r", "3", "--log-dir", str(tmp_path / "logs")])
    assert job.code == 0, job.stderr
    assert [event.fields["how"] for event in job.of("newcomer_start")] == ["respawn"]
    for rank in (0, 1):
        (file,) = tmp_path.glob(f"logs/*/attempt_0/{rank}/stdout.log")
        expected = {"rank": rank, "name": "__main__", "path": str(tmp_path), "group": True, "argv": ["a b"]}
        assert json.loads(file.read_text()) == expected


def test_the_same_exception_twice_ends_the_job(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
def deep():
    raise ValueError("bad record 17")
if me.rank == 1:
    deep()
await_("never", 1)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 1
    assert "raised the same exception at the same place twice" in job.stderr
    assert "ValueError: bad record 17" in job.stderr
    assert "rank      : 1 (local_rank: 1)" in job.stderr
    assert "in deep" in job.stderr
    assert len(job.of("lost")) == 2
    assert job.of("end")[0].fields["result"] == "failed"
    # the worker's own traceback starts at the user's frame
    own = job.stderr[job.stderr.index("Traceback") :].splitlines()[:2]
    assert own[1].startswith(f'  File "{tmp_path / "script.py"}"')


def test_a_crash_loop_ends_with_the_first_death(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.rank == 0:
    os._exit(9)
await_("never", 1)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 1
    assert "died 3 times in a row without progress" in job.stderr
    assert "rank      : 0 (local_rank: 0)" in job.stderr and "exitcode  : 9" in job.stderr
    lost = job.of("lost")
    assert len(lost) == 3
    # back-off: at once, then after half a second
    assert lost[2].time - lost[1].time >= 0.5


def test_progress_breaks_a_crash_loop_and_the_budget_ends_it(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.rank == 0:
    progress_file.ProgressFile(me.rank_dir / "progress").top(me.incarnation + 1)
    os._exit(9)
await_("never", 1)
"""
    )
    job = run(tmp_path, script, options=["--max-restarts", "4"])
    assert job.code == 1
    assert "no replacements are left (--max-restarts)" in job.stderr
    assert [event.fields["tops"] for event in job.of("lost")] == [1, 2, 3, 4, 5]


def test_a_worker_without_progress_is_replaced(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.incarnation == 0:
    progress = progress_file.ProgressFile(me.rank_dir / "progress")
    progress.top(1)
    if me.rank == 0:
        progress.waiting(True)  # in a collective: does not count
        generation(1)
    else:
        signal.pause()
"""
    )
    job = run(tmp_path, script, env={"SWIFT_RECOVERY_DETECTION_PROGRESS_TIMEOUT_S": "0.5"})
    assert job.code == 0, job.stderr
    (lost,) = job.of("lost")
    assert lost.rank == 1 and "no progress for 0.5 s" in lost.fields["cause"]


def test_all_workers_lost_restarts_the_job(tmp_path: Path) -> None:
    """The second attempt has its own store, and nothing of what the first one published."""
    script = (
        PRELUDE
        + """
if me.restart == 0:
    (me.rank_dir).mkdir(exist_ok=True)
    reach("up")
    if me.rank == 0:
        pids = [await_("up", 0), await_("up", 1)]
        os.kill(os.getppid(), signal.SIGSTOP)
        os.system(f"(kill -9 {pids[1]} {pids[0]}; sleep 0.2; kill -CONT {os.getppid()}) & ")
    signal.pause()
assert not store.check(["test/up/0"]) and not me.rank_dir.exists()
show(rank=me.rank, restart=me.restart, generation=me.generation, incarnation=me.incarnation)
"""
    )
    job = run(tmp_path, script)
    assert job.code == 0, job.stderr
    assert sorted(one["rank"] for one in shown(job)) == [0, 1]
    assert all((one["restart"], one["generation"], one["incarnation"]) == (1, 0, 0) for one in shown(job))
    assert job.of("restart")[0].fields["reason"] == "all workers are lost"
    assert len(job.of("start")) == 2


def test_on_failure_restart_restarts_all(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
if me.restart == 0:
    reach("up")
    if me.rank == 0:
        os.kill(await_("up", 1), signal.SIGKILL)
    signal.pause()
show(rank=me.rank, restart=me.restart)
"""
    )
    job = run(tmp_path, script, options=["--on-failure", "restart", "--checkpoint-dir", "saved", "--max-restarts", "1"])
    assert job.code == 0, job.stderr
    assert sorted((one["rank"], one["restart"]) for one in shown(job)) == [(0, 1), (1, 1)]
    assert "all 2 workers are back after" in job.stderr and "checkpoints: saved" in job.stderr


def test_what_workers_say_is_done(tmp_path: Path) -> None:
    """``divergent`` replaces, ``restart`` restarts all, ``fail`` ends the job with the worker's message."""
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    if me.restart == 0:
        await_("up0", 1)
        link.tell(store, "divergent", [1])
        show(gen=generation(1))
        await_("up1", 1)
        link.tell(store, "restart", {"reason": "nobody can serve rank 1"})
    else:
        store.set(me.prefix + "fail", json.dumps({"rank": 1, "message": "ReplayDivergence: rank 1 differs"}))
signal.pause()
"""
    )
    job = run(tmp_path, script)
    assert job.code == 1
    (said,) = shown(job)
    assert said["gen"]["cause"] == {"1": "its state differs from its replicas'"}
    assert job.of("restart")[0].fields["reason"] == "nobody can serve rank 1"
    assert "rank 1: ReplayDivergence: rank 1 differs" in job.stderr
    assert "rank      : 1" in job.stderr
    assert job.of("end")[0].fields["reason"] == "ReplayDivergence: rank 1 differs"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_everything(tmp_path: Path, number: signal.Signals) -> None:
    """Workers that will not end by themselves are killed after the grace; exit code 1 is torchrun's."""
    script = (
        PRELUDE
        + """
import subprocess
subprocess.Popen(["sleep", "600"], start_new_session=True)
if me.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
reach("up")
if me.rank == 0:
    await_("up", 1)
    show(agent=os.getppid())
while True:
    signal.pause()
"""
    )
    job = start(tmp_path, script, options=["--shutdown-timeout", "1"])
    assert job.process.stdout is not None
    agent = json.loads(job.process.stdout.readline())["agent"]
    assert agent == job.process.pid
    open_ports = [one for one in psutil.Process(agent).net_connections() if one.status == psutil.CONN_LISTEN]
    assert len(open_ports) == 1, "the store of the attempt, and no rendezvous"
    os.kill(agent, number)
    job.finish(20)
    job.check_nothing_left()
    assert job.code == 1
    assert f"received {number.name}" in job.stderr


def test_a_dead_agent_takes_everything_with_it(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
reach("up")
if me.rank == 0:
    await_("up", 1)
    os.kill(os.getppid(), signal.SIGKILL)
while True:
    signal.pause()
"""
    )
    job = start(tmp_path, script)
    job.finish(20)
    assert job.code == -signal.SIGKILL
    while tagged(job.tag):  # the kernel ends them; the test's time-out is the limit
        os.sched_yield()


def test_a_killed_standby_is_replaced(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
reach(f"up{me.incarnation}")
if me.rank == 0:
    await_("up0", 1)
    agent = os.getppid()
    mine = {os.getpid(), await_("up0", 1)}
    tasks = open(f"/proc/{agent}/task/{agent}/children").read().split()
    for pid in set(map(int, tasks)) - mine:
        os.kill(pid, signal.SIGKILL)
    os.kill(await_("up0", 1), signal.SIGKILL)
    await_("up1", 1)
elif me.incarnation == 0:
    signal.pause()
"""
    )
    job = run(tmp_path, script)
    assert job.code == 0, job.stderr
    assert "a standby died" in job.stderr
    assert [event.fields["how"] for event in job.of("newcomer_start")] == ["standby"]


def test_modules_programs_and_exit_codes(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "go.py").write_text(
        "import sys\nprint('module', __spec__.name, sys.argv[1:], flush=True)\nsys.exit(3)\n"
    )
    base = [sys.executable, "-m", "shared_core.cli.swiftrun", "--events", "events.jsonl", "--standbys", "0"]
    job = start_command(tmp_path, [*base, "--max-restarts", "0", "-m", "pack.go", "x"]).finish()
    assert job.code == 1
    assert "module pack.go ['x']" in job.stdout
    assert "exitcode  : 3" in job.stderr
    job.check_nothing_left()
    job = start_command(tmp_path, [*base, "--max-restarts", "0", "--no-python", "sh", "-c", "exit 4"]).finish()
    assert job.code == 1 and "exitcode  : 4" in job.stderr


def test_options_come_from_file_environment_and_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.json").write_text('{"seed": 1, "detection.wait_timeout_s": 1, "on_failure": "restart"}')
    monkeypatch.setenv("SWIFT_RECOVERY_DETECTION_WAIT_TIMEOUT_S", "2")
    monkeypatch.setenv("PET_CHECKPOINT_DIR", str(tmp_path))
    args = parse_args(
        ["--swift-config", str(tmp_path / "c.json"), "--on-failure", "replace", "x.py", "--standbys", "3"]
    )
    config = build_config(args)
    assert (config.seed, config.detection.wait_timeout_s, config.on_failure) == (1, 2.0, "replace")
    assert config.checkpoint.dir == str(tmp_path)
    assert (args.max_restarts, args.standbys, args.training_script_args) == (100, 1, ["--standbys", "3"])
    assert parse_args(["--max-restarts", "0", "x.py"]).max_restarts == 0


def test_options_of_the_script_are_its_own() -> None:
    """Also those that are the beginning of one of ours, or of several."""
    own = ["--checkpoint", "x", "--stand=1", "--no", "--n", "2", "--resume", "--nproc_per_node", "8"]
    for flags in (["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--nproc-per-node=2"]):
        args = parse_args([*flags, "--max_restarts", "3", "--standbys", "0", "train.py", *own])
        assert (args.nproc_per_node, args.max_restarts, args.standbys, args.resume) == ("2", 3, 0, False)
        assert (args.training_script, args.training_script_args) == ("train.py", own)


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    job = start_command(tmp_path, [sys.executable, "-m", "shared_core.cli.swiftrun", "--standbys", "0", "missing.py"])
    job.finish()
    assert job.code == 2
    assert job.stderr.splitlines() == ["swiftrun: ConfigError: the training script 'missing.py' does not exist"]


def test_a_foreign_entry_in_the_ledger_ends_the_job_with_a_line(tmp_path: Path) -> None:
    job = run(
        tmp_path,
        """
        import time
        from shared_core.protocol import worker_env
        from shared_core.worker import link
        me = worker_env.env()
        if me.rank == 0:
            link.connect_store().set(me.prefix + "gen/1", '{"generation": 0, "incarnations": [0, 0]}')
        time.sleep(600)
        """,
    )
    assert job.code in (1, 2)
    (said,) = [line for line in job.stderr.splitlines() if "is damaged or was written by something else" in line]
    assert said.startswith("swiftrun: DamagedRecord: the entry "), job.stderr
    assert "Traceback" not in job.stderr
    job.check_nothing_left()


FAULTY = """
import os
from shared_core.faults import point
for step in range(3):
    point("batch_top")
print(f"rank {os.environ['RANK']} ends")
"""
_FAULTS = '[{"rank": 1, "step": 2, "point": "batch_top", "kind": "SIGKILL"}]'


@pytest.mark.parametrize("standbys", ["0", "1"])
def test_faults_are_armed_by_a_flag_alone(standbys: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(_FAULTS)
    options = ["--standbys", standbys]
    if standbys == "0":
        inherited = {"SWIFT_FAULTS": _FAULTS, "SWIFT_FAULTS_FILE": str(path), "SWIFT_FAULTS_LAUNCHER": str(os.getpid())}
        job = run(tmp_path, FAULTY, options=options, env=inherited)
        assert job.code == 0 and job.stdout.count("ends") == 2, job.stderr
        assert not job.of("lost") and not job.of("fault")
        assert "SWIFT_FAULTS in the environment has no effect" in job.stderr
    else:
        job = run(tmp_path, FAULTY, options=[*options, "--faults", str(path)])
        assert job.code == 0 and job.stdout.count("ends") == 2, job.stderr
        assert [event.rank for event in job.of("lost")] == [1] == [event.rank for event in job.of("fault")]


def test_faults_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    job = start(tmp_path, "", options=["--standbys", "0", "--faults", "nowhere.json"]).finish()
    assert job.code == 2
    assert job.stderr.startswith("swiftrun: ConfigError: --faults: cannot read nowhere.json: "), job.stderr
    assert job.stderr.count("\n") == 1


@pytest.mark.parametrize("standbys", [pytest.param("0", marks=pytest.mark.nightly), "1"])
def test_imports_come_from_beside_the_script(standbys: str, tmp_path: Path) -> None:
    """As under torchrun; the standby has imported ``calendar``, and torch ``fractions``, when the script begins."""
    here, program = tmp_path / "here", tmp_path / "program"
    here.mkdir()
    program.mkdir()
    for name in ("random", "selectors", "fractions", "calendar", "numpy", "sklearn"):
        (here / f"{name}.py").write_text(f"raise SystemExit('{name} of the working directory was imported')")
    for name in ("calendar", "fractions"):
        (program / f"{name}.py").write_text("MINE = True")
    (program / "script.py").write_text("""
import calendar, fractions, os, random, sys
import torch
assert calendar.MINE and fractions.MINE and random.random() < 1 and torch.ones(1).sum() == 1
assert sys.path[0] == os.path.dirname(__file__) and "" not in sys.path and os.getcwd() not in sys.path
""")
    swiftrun = str(Path(sys.executable).with_name("swiftrun"))
    options = ["--nproc-per-node", "1", "--standbys", standbys, "--preload", "calendar,sklearn", "--events", ""]
    job = start_command(here, [swiftrun, *options, str(program / "script.py")]).finish()
    assert job.code == 0, job.stderr
    assert "of the working directory" not in job.stderr

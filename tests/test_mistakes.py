"""What users do wrong, and what they are told."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from harness import Jobs, few

import shared_core
from shared_core.errors import ConfigError
from shared_core.faults import Fault
from tests.support.runner import ROOT

FAILURE = [Fault(1, 5, "bucket", "SIGKILL", nth=2)]


def _python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_unseeded_random_numbers_are_found_when_they_matter(jobs: Jobs) -> None:
    result = jobs.run("plain_ddp.py", faults=FAILURE, args=["--mistake", "unseeded"])
    assert result.status == 1
    said = (
        r"ReplayDivergence: at .*batch \d+, the replacement of rank 1 computed another gradient than the failed worker"
    )
    assert re.search(said, result.stderr), result.tail()
    assert (
        "training is not deterministic here. Likely causes: an unseeded or unregistered random number" in result.stderr
    )
    assert re.search(r"Input to operation \d+ of group .*: checksum \w+, and \w+ before", result.stderr)
    assert "docs/troubleshooting.md#replaydivergence" in result.stderr


def test_another_collective_than_the_failed_workers_is_found(jobs: Jobs) -> None:
    result = jobs.run("plain_ddp.py", faults=[Fault(1, 6, "step_boundary", "SIGKILL")], args=["--mistake", "branch"])
    assert result.status == 1
    assert "ReplayDivergence" in result.stderr, result.tail()
    assert "float64" in result.stderr and "float32" in result.stderr, result.tail()


def test_a_model_that_differs_between_ranks_is_named(jobs: Jobs) -> None:
    result = jobs.run("plain_ddp.py", args=["--mistake", "model"])
    assert result.status == 1
    assert re.search(r"(?i)same (model|param)|params", result.stderr), result.tail()
    assert re.search(r"(?i)rank \[?[01]", result.stderr), result.tail()


#: By what lets ranks train apart; see ``apart.py``.
APART = {
    "join": r"Unsupported: Join and model\.join\(\) let ranks end a pass after different numbers of batches",
    "hook": "Unsupported: the communication hook .* keeps a PowerSGDState from batch to batch",
    "group": "Unsupported: DistributedDataParallel over a group of 1 of the job's 2 ranks",
    "zero": "UnsupportedOptimizer: ZeroRedundancyOptimizer divides the optimizer's state over the ranks",
    "averager": "UnsupportedOptimizer: PostLocalSGDOptimizer wraps another optimizer",
    "inside": "ConfigError: Adam has stepped parameter module.weight, which is attached without this optimizer",
    "forgotten": "ConfigError: Adam has stepped parameter module.weight, which is attached without this optimizer",
    "experts": r"Unsupported: ranks have trained parameter weight .* job\.register\(module, its_optimizer\)",
}


@pytest.mark.parametrize("way", few(APART, "zero"))
def test_what_ranks_train_apart_is_refused_without_a_failure(way: str, jobs: Jobs) -> None:
    result = jobs.run("apart.py", args=[way])
    assert result.status == 1, result.tail()
    (line,) = result.told("the job failed")
    assert re.search(APART[way], line), result.tail()


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["registered", "wrapped"])
def test_what_is_registered_or_wrapped_is_not_refused(way: str, jobs: Jobs) -> None:
    faults = [Fault(1, 3, "update.before", "SIGKILL"), Fault(0, 5, "bucket", "SIGKILL")]
    jobs.check("apart.py", faults=faults, args=[way])


def test_an_exception_that_comes_again_ends_the_job_with_it(jobs: Jobs) -> None:
    result = jobs.run("plain_ddp.py", args=["--mistake", "raise"])
    assert result.status == 1
    assert "ZeroDivisionError: a mistake of the user's" in result.stderr
    assert "rank 1 raised the same exception at the same place twice" in result.stderr, result.tail()
    assert len(result.kinds("failed")) == 2


@pytest.mark.nightly
def test_torchrun_is_told_once_that_survivors_cannot_be_kept_alive(jobs: Jobs) -> None:
    args = ["--feature", "epochs"]
    result = jobs.run("lit.py", launcher="torchrun", env={"SWIFT_BASELINE": ""}, args=args)
    assert result.status == 0, result.tail()
    warnings = [line for line in result.stderr.splitlines() if "swiftrun" in line]
    assert len(warnings) == 1, result.tail()
    assert "survivors" in warnings[0] and "torchrun" in warnings[0]


@pytest.mark.nightly
def test_plain_python_is_told_once_how_to_start() -> None:
    code = "import shared_core; shared_core.install(); shared_core.install()"
    said = "[swift] one process: nothing to recover from; start with swiftrun --nproc-per-node N SCRIPT\n"
    assert _python(code).stderr == said
    assert _python(code, RANK="0").stderr == ""


def test_an_unknown_option_of_the_strategy() -> None:
    strategy = pytest.importorskip("lightning_swift").SwiftDDPStrategy
    with pytest.raises((TypeError, ConfigError), match="on_failur"):
        strategy(on_failur="replace")
    with pytest.raises(ConfigError, match="data must be one of 'restore', 'refetch', 'seeded', got 'seedy'"):
        strategy(data="seedy")


def test_a_missing_extra_is_named() -> None:
    block = "import sys\nfor name in ('lightning', 'pytorch_lightning'): sys.modules[name] = None\n"
    done = _python(block + "import lightning_swift")
    assert done.returncode == 1
    assert "pip install 'swift-recovery[lightning]'" in done.stderr, done.stderr


def test_faults_that_cannot_be_read_say_why(jobs: Jobs) -> None:
    done = _python(
        "from shared_core.faults import inject; inject.point('startup')",
        RANK="0",
        SWIFT_FAULTS_LAUNCHER=str(os.getpid()),
        SWIFT_FAULTS='[{"rank": 0, "step": 1, "point": "buckets", "kind": "SIGKILL"}]',
    )
    assert done.returncode == 1
    assert "unknown point 'buckets'; did you mean 'bucket'?" in done.stderr


def test_the_end_of_a_range_of_epochs_comes_first() -> None:
    loop = shared_core.attach(net := torch.nn.Linear(2, 2), torch.optim.SGD(net.parameters(), 0.1))
    assert list(loop.epochs(4, start=1)) == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"job.epochs\(1, 4\): .* as in job.epochs\(4, start=1\)"):
        next(loop.epochs(1, 4))

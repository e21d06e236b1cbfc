"""Wrong input of every kind: one line that names the flag or file and what is allowed, and exit status 1 or 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import wrong_options
import wrong_swiftctl
import wrong_swiftrun

from shared_core.cli import swiftctl, swiftrun
from shared_core.config import CheckpointOptions, SwiftConfig, variable_of
from shared_core.events import Event


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are not what they should be, and some that are."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "noise").write_bytes(bytes(range(256)) * 4)
    os.mkfifo(folder / "fifo")
    profile = {"machines": [{"compute_s": 1.0}] * 2, "boundary_bytes": [100], "steps_between_checkpoints": 10}
    texts = {
        "train.py": "",
        "list.json": "[1]",
        "broken.json": '{"seed": 1,',
        "deep.json": "[" * 100_000,
        "broken.yaml": "seed: [1\n",
        "numbered.yaml": "3: 4\n",
        "seed.yaml": "seed: 2.7\n",
        "profile.json": json.dumps(profile),
        "nan.json": json.dumps(profile | {"machines": [{"compute_s": float("nan")}, {"compute_s": 1.0}]}),
        "trace_nan.csv": "# workers: 8\nnan,-1\n",
        "events.jsonl": Event("start", 1.0, run="aaaa").to_json() + "\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PET_STANDBYS", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


Check = Callable[..., None]


@pytest.fixture
def check(odd: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Check]:
    """Runs a command line and notes what is wrong with what it says; all of a table are tried, as that is faster."""
    wrong: list[str] = []

    def one(command: Callable[[list[str]], object], line: str, *parts: str, **variables: str) -> None:
        words = [word.replace("@", f"{odd}/").replace("SCRIPT", f"{odd}/train.py") for word in line.split()]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value.replace("@", f"{odd}/"))
            try:
                status = command(words)
            except SystemExit as ended:
                status = ended.code
            except Exception as error:
                status = repr(error)
        printed = capsys.readouterr()
        prog = "swiftctl: " if command is swiftctl.main else "swiftrun: "
        good = status in (1, 2) and printed.err.count("\n") == 1 and printed.err.startswith(prog) and not printed.out
        if not good or not all(part in printed.err for part in parts) or not printed.err.strip().isprintable():
            wrong.append(f"{line} {variables or ''}: {status}, wanted {parts}, got {printed.err or printed.out}")

    yield one
    assert not wrong, "\n".join(wrong)


def test_swiftctl(check: Check) -> None:
    for case in wrong_swiftctl.CASES:
        check(swiftctl.main, *case)


def test_swiftrun(check: Check) -> None:
    for case in wrong_swiftrun.CASES:
        check(swiftrun.main, *case)
    for name, value, *parts in wrong_swiftrun.VARIABLES:
        check(swiftrun.main, "SCRIPT", *parts, **{name: value})


def test_options(check: Check, tmp_path: Path) -> None:
    path = tmp_path / "options.json"
    for values, allowed in wrong_options.OPTIONS:
        path.write_text(json.dumps(values))
        check(swiftrun.main, f"--swift-config {path} SCRIPT", next(iter(values)), allowed)
    full = {variable_of(name).removeprefix("SWIFT_RECOVERY_"): name for name, _ in SwiftConfig().items()}
    for name, value, allowed in wrong_options.VARIABLES:
        check(swiftrun.main, "SCRIPT", full.get(name, name.lower()), allowed, **{f"SWIFT_RECOVERY_{name}": value})


def test_a_user_sees_one_line(odd: Path, tmp_path: Path) -> None:
    """The same in a process of its own, standby included."""
    started = {name: value for name, value in os.environ.items() if name != "PET_STANDBYS"}
    command = [sys.executable, "-m", "shared_core.cli.swiftrun", "--nproc-per-node", "0", str(odd / "train.py")]
    ended = subprocess.run(command, env=started, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "--nproc-per-node" in ended.stderr and "at least 1" in ended.stderr


def test_what_is_not_wrong(odd: Path) -> None:
    """torchrun's forms are read as ever."""
    for line in (
        "--nnodes 1:1 --nproc-per-node cpu",
        "--nproc_per_node auto --rdzv-backend c10d",
        "--nnodes 1:4 --rdzv_backend c10d --rdzv_endpoint a:29400 --rdzv-conf join_timeout=5,read_timeout=7",
        "--redirects 0:3,1:0 --tee 3 --local_ranks_filter 0,1 --max_restarts=0 --master-port 0",
        "--signals-to-handle SIGTERM,SIGUSR1 --monitor-interval 1 --shutdown-timeout 0",
    ):
        args = swiftrun.parse_args([*line.split(), str(odd / "train.py"), "--nnodes", "x", "--", "-1"])
        assert args.training_script_args == ["--nnodes", "x", "--", "-1"]
    config = SwiftConfig.from_env(
        {f"SWIFT_RECOVERY_{name}": "1" for name in ("SEED", "DETECTION_WAIT_TIMEOUT_S", "STATE_VERIFY_CHECKSUMS")}
    )
    assert (config.seed, config.detection.wait_timeout_s, config.state.verify_checksums) == (1, 1.0, True)
    assert CheckpointOptions(dir=odd).dir == str(odd)  # type: ignore[arg-type]

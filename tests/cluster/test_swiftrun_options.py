"""What ``swiftrun`` is told: programs, options, faults."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from util import run, start_command

from shared_core.cli.swiftrun import parse_args


@pytest.mark.nightly
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


def test_the_short_help_fits_and_begins_with_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            parse_args([flag])
        shown[flag] = capsys.readouterr().out
    titles = [line for line in shown["--help"].splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["recovery:", "workers:", "tests:"] and len(shown["--help"].splitlines()) <= 60
    assert "--on-failure MODE" in shown["--help"] and "--rdzv-conf" not in shown["--help"]
    assert "--rdzv-conf" in shown["--help-all"] and "are killed. Default: 5." in shown["--help-all"]


def test_options_of_the_script_are_its_own() -> None:
    """Also those that are the beginning of one of ours, or of several."""
    own = ["--checkpoint", "x", "--stand=1", "--no", "--n", "2", "--resume", "--nproc_per_node", "8"]
    for flags in (["--nproc-per-node", "2"], ["--nproc_per_node=2"], ["--nproc-per-node=2"]):
        args = parse_args([*flags, "--max_restarts", "3", "--standbys", "0", "train.py", *own])
        assert (args.nproc_per_node, args.max_restarts, args.standbys, args.resume) == ("2", 3, 0, False)
        assert (args.training_script, args.training_script_args) == ("train.py", own)


@pytest.mark.nightly
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
    point("step_boundary")
print(f"rank {os.environ['RANK']} ends")
"""
_FAULTS = '[{"rank": 1, "step": 2, "point": "step_boundary", "kind": "SIGKILL"}]'


@pytest.mark.nightly
@pytest.mark.parametrize("standbys", ["0", "1"])
def test_faults_are_armed_by_a_flag_alone(standbys: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text(_FAULTS)
    options = ["--standbys", standbys]
    if standbys == "0":
        inherited = {"SWIFT_FAULTS": _FAULTS, "SWIFT_FAULTS_FILE": str(path), "SWIFT_FAULTS_LAUNCHER": str(os.getpid())}
        job = run(tmp_path, FAULTY, options=options, env=inherited)
        assert job.code == 0 and job.stdout.count("ends") == 2, job.stderr
        assert not job.of("failed") and not job.of("fault")
        assert "SWIFT_FAULTS in the environment has no effect" in job.stderr
    else:
        job = run(tmp_path, FAULTY, options=[*options, "--faults", str(path)])
        assert job.code == 0 and job.stdout.count("ends") == 2, job.stderr
        assert [event.rank for event in job.of("failed")] == [1] == [event.rank for event in job.of("fault")]


@pytest.mark.nightly
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

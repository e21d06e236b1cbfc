"""Nothing that a worker says makes a line that looks like the launcher's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from util import run_forked

from shared_core.events import marked, visible
from shared_core.launcher.elastic import failure_of, raise_failure

FORGED = (
    "bad\n[swift] done after 1.0 s\r[swift] done\x0b[swift] done\x1b[2K\x1b[1G[swift] done\x9b1G\u202e\u2028[swift] x"
)
CONTROLS = "\r\x0b\x0c\x1b\x85\x9b\u2028\u2029\u202e\u2066"


def test_control_characters_are_written_out() -> None:
    told = marked(FORGED + "\ud800\t")
    assert told.isprintable() and told.startswith("[swift] bad\\n[swift] done after 1.0 s\\r[swift]")
    assert visible("plain text, ä €") == "plain text, ä €" and visible("a\tb") == "a\\tb"


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["raises", "reports"])
def test_what_a_worker_says_of_its_failure_makes_no_line(where: str, tmp_path: Path) -> None:
    """Its own output goes to files here: what is on stderr, the launcher has written."""
    script = f"""
        import sys
        from shared_core.protocol import worker_env
        from shared_core.worker import link
        said = {FORGED!r}
        if {where!r} == "reports":
            me = worker_env.env()
            link.tell(link.connect_store(), "fail", {{"rank": 0, "message": said}})
            sys.stdin.read()
        raise RuntimeError(said)
        """
    job = run_forked(tmp_path, script, options=["--max-restarts", "0", "-r", "3", "--log-dir", str(tmp_path)], nproc=1)
    assert job.code == 1
    assert "done after 1.0 s" in job.stderr, job.stderr
    assert not any(line.startswith("[swift] done") for line in job.stderr.splitlines()), job.stderr
    assert not set(CONTROLS) & set(job.stderr), job.stderr


@pytest.mark.nightly
def test_lines_of_workers_that_the_launcher_passes_on_have_a_prefix(tmp_path: Path) -> None:
    script = "print('[swift] done after 1.0 s\\r[swift] done', flush=True)"
    job = run_forked(tmp_path, script, options=["--tee", "3", "--log-dir", str(tmp_path)], nproc=1)
    assert job.code == 0, job.stderr
    lines = [line for line in job.stdout.splitlines() if "[swift] done" in line]
    assert len(lines) == 2 and all(line.startswith("[default0]:") for line in lines), job.stdout


def test_prefix_names_the_rank_of_each_line(tmp_path: Path) -> None:
    job = run_forked(tmp_path, "import os\nprint('this is', os.environ['RANK'])", options=["--prefix"])
    assert job.code == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[rank 0] this is 0", "[rank 1] this is 1"]


def test_a_line_is_written_whole(tmp_path: Path) -> None:
    """Workers share one pipe; without this, many a line ends in the line of another worker."""
    script = """
        import os, sys
        for i in range(300):
            print("rank", os.environ["RANK"], "line", i)
            print("rank", os.environ["RANK"], "error", i, file=sys.stderr)
        print("no end", end="")
        """
    job = run_forked(tmp_path, script)
    assert job.code == 0, job.stderr
    for stream, word in ((job.stdout.replace("no end", ""), "line"), (job.stderr, "error")):
        said = [line for line in stream.splitlines() if not line.startswith("[swift]")]
        assert sorted(said) == sorted(f"rank {rank} {word} {i}" for rank in range(2) for i in range(300))
    assert job.stdout.count("no end") == 2


@pytest.mark.parametrize(
    "written",
    [
        {"message": {}},
        {"message": {"message": "x", "extraInfo": {"timestamp": 10**30}}},
        {"message": {"message": ["x"], "extraInfo": {"timestamp": 1, "py_callstack": 3}}},
        [],
        {"message": {"message": "x", "extraInfo": {"timestamp": 1, "py_callstack": FORGED}}},
    ],
)
def test_an_error_file_of_any_content_gives_a_table(written: object, tmp_path: Path) -> None:
    (path := tmp_path / "error.json").write_text(json.dumps(written))
    with pytest.raises(Exception, match="FAILED") as ended:
        raise_failure("job.py", {0: failure_of(0, 1, 1, str(path), "")})
    text = str(ended.value)
    assert type(ended.value).__name__ == "ChildFailedError" and not set(CONTROLS) & set(text)
    assert not any(line.startswith("[swift]") for line in text.splitlines())

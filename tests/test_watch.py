"""A running job as it is seen from outside: ``swiftctl status`` and ``watch``, the dashboard, metrics."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpointed import Running, finished, options, running
from harness import Jobs, until
from prometheus_client.parser import text_string_to_metric_families

from shared_core.cli import serving, swiftctl
from shared_core.watch import metrics
from shared_core.watch.server import DashboardServer
from shared_core.watch.view import Live, view_of

ROOT = Path(__file__).parents[1]
EMPTY = lambda: view_of([], Live(0.0))  # noqa: E731


@contextlib.contextmanager
def watched(jobs: Jobs, *launcher_args: str) -> Iterator[Running]:
    """A job of two workers that train until they are told that it is enough."""
    env = options(jobs.folder("checkpoints"), every=40)
    with running(jobs, "until_told.py", env=env, launcher_args=launcher_args) as job:
        job.until(lambda: job.boundaries(1) > 2)
        yield job


def status(job: Running, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert swiftctl.main(["status", "--json", str(job.pid)]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def served_at(job: Running, what: str) -> int:
    """The port that the console names."""
    match = re.search(rf"\[swift\] {what}: http://127\.0\.0\.1:(\d+)/", (job.out / "stderr.txt").read_text())
    assert match is not None
    return int(match[1])


def ask(
    port: int, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def scraped(port: int) -> dict[str, float]:
    """Samples by name, and labels where there are any."""
    code, _, body = ask(port, "/metrics")
    assert code == 200
    return {
        sample.name + ("" if not sample.labels else str(sorted(sample.labels.values()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def kill(job: Running, capsys: pytest.CaptureFixture[str], rank: int = 1) -> int:
    """SIGKILL to a worker, whose pid is returned."""
    pid = int(status(job, capsys)["workers"][rank]["pid"])
    os.kill(pid, signal.SIGKILL)
    return pid


def test_a_failure_is_seen_everywhere(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    with watched(jobs, "--dashboard=0", "--metrics-port=0") as job:
        page, numbers = served_at(job, "dashboard"), served_at(job, "metrics")
        before = until(lambda: (one := status(job, capsys))["checkpoint"] and one, lambda: "there is no checkpoint")
        assert (before["state"], before["present"], before["failures"], before["generation"]) == ("running", 2, [], 0)
        assert before["script"].endswith("until_told.py") and before["steps_per_s"] > 0
        assert {one["phase"] for one in before["workers"]} <= {"training", "waiting"}
        assert json.loads(ask(page, "/view.json")[2])["run"] == before["run"]
        assert before["goodput"] == 1.0 and all(one["memory_bytes"] > 1e6 for one in before["workers"])
        samples = scraped(numbers)
        assert (samples["swift_workers"], samples["swift_job_state['running']"]) == (2, 1)
        assert samples["swift_step"] >= before["step"] and "swift_failures_total['SIGKILL']" not in samples

        failed = kill(job, capsys)
        after = until(
            lambda: (one := status(job, capsys))["recoveries"] and one["workers"][1]["phase"] == "training" and one,
            lambda: f"the failure is not seen: {status(job, capsys)}",
        )
        (failure,) = after["failures"]
        replacement = after["workers"][1]["pid"]
        assert (failure["rank"], failure["pid"], failure["replacement"], failure["kind"]) == (
            1,
            failed,
            replacement,
            "SIGKILL",
        )
        assert replacement != failed and Path(f"/proc/{replacement}").exists() and failure["stall_s"] > 0
        assert (after["state"], after["present"], after["generation"]) == ("running", 2, 1)
        assert {span["what"] for span in after["spans"]} == {"failed", "joining", "stalled", "checkpoint"}
        samples = until(  # the agent reads the events by itself
            lambda: (one := scraped(numbers)).get("swift_recoveries_total['replace']") and one,
            lambda: "the recovery is not among the metrics",
        )
        assert samples["swift_failures_total['SIGKILL']"] == samples["swift_recoveries_total['replace']"] == 1
        assert samples["swift_stall_seconds_total"] == pytest.approx(after["stall_s"], abs=0.5)
        assert samples["swift_checkpoint_age_seconds"] >= 0 and samples["swift_generation"] == 1
        assert json.loads(ask(page, "/view.json")[2])["failures"][0]["pid"] == failed

        assert swiftctl.main(["status", after["run"][:6]]) == 0
        text = capsys.readouterr().out
        assert f"{failed}" in text and f"{replacement}" in text and "killed by SIGKILL" in text and "\x1b" not in text
        (job.out / "enough").touch()
        finished(job)
    assert swiftctl.main(["status", str(job.out / "events.jsonl")]) == 0
    assert re.search(r"^\w+\.py, run \w+: succeeded, after \d+ s without start-up\n", capsys.readouterr().out)


def test_what_the_server_answers() -> None:
    server = DashboardServer("--dashboard", "127.0.0.1", 0)
    server.serve(serving.dashboard_pages(EMPTY) | metrics.pages_of(EMPTY))
    with contextlib.closing(server):
        code, headers, body = ask(server.port, "/")
        assert code == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        policy = dict(each.strip().partition(" ")[::2] for each in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
        assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", policy[name]) for name in ("script-src", "style-src"))
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
        assert b"//" not in body.replace(b"http://www.w3.org/2000/svg", b"").replace(b"// All that", b"")
        for path in ("/", "/view.json", "/metrics"):
            for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE"):
                assert ask(server.port, path, method)[0] == 405, (path, method)
            code, headers, _ = ask(server.port, path, host="evil.example")
            assert code == 421 and "'none'" in headers["Content-Security-Policy"]
        assert ask(server.port, "/../etc/passwd")[0] == 404
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as refused:
            refused.sendall(b"GET / HTTP/1.1\r\n\r\n")  # no Host at all
            assert b" 421 " in refused.recv(100)


@pytest.mark.nightly
def test_watch_on_a_terminal(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    with watched(jobs) as job:
        mine, its = pty.openpty()
        command = [sys.executable, "-m", "shared_core.cli.swiftctl", "watch", "--every", "0.1", str(job.pid)]
        watching = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, cwd=ROOT, env=os.environ | {"TERM": "xterm"}
        )
        os.close(its)
        shown = bytearray()

        def sees(text: str) -> bool:
            with contextlib.suppress(OSError):
                shown.extend(os.read(mine, 65536))
            return text.encode() in shown

        until(lambda: sees("training"), lambda: shown.decode(errors="replace"))
        failed = kill(job, capsys)
        until(lambda: sees("killed by SIGKILL") and sees(str(failed)), lambda: shown.decode(errors="replace"))
        assert b"\x1b[" in shown
        (job.out / "enough").touch()
        finished(job)
        until(lambda: sees("succeeded") or watching.poll() is not None, lambda: shown.decode(errors="replace"))
        assert watching.wait(20) == 0
        os.close(mine)


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on the PATH")
@pytest.mark.skipif(shutil.which("chromedriver") is None, reason="there is no chromedriver on the PATH")
def test_the_page_in_a_browser(jobs: Jobs, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A failure is shown without a reload, and what a script says is text."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    wanted = webdriver.ChromeOptions()
    wanted.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}"):
        wanted.add_argument(argument)
    wanted.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=wanted, service=Service(shutil.which("chromedriver")))
    try:
        with watched(jobs, "--dashboard=0") as job:
            browser.get(f"http://127.0.0.1:{served_at(job, 'dashboard')}/")

            def text(of: str) -> str:
                return str(browser.execute_script("return document.getElementById(arguments[0]).innerText", of))

            until(lambda: text("state") == "running", lambda: text("about"))
            assert "No worker failed" in text("failures") and browser.title == "until_told.py: running"
            browser.execute_script("window.opened = 'once'")
            failed = kill(job, capsys)
            until(lambda: str(failed) in text("failures"), lambda: text("failures"))
            replacement = until(
                lambda: status(job, capsys)["failures"][0]["replacement"], lambda: "there is no replacement"
            )
            until(lambda: str(replacement) in text("workers"), lambda: text("workers"))
            count = "return document.querySelectorAll('#timeline rect.' + arguments[0]).length"
            until(lambda: browser.execute_script(count, "stalled") == 1, lambda: "no stall is drawn")
            assert browser.execute_script(count, "failed") == browser.execute_script(count, "joining") == 1
            assert "2 of 2 workers, 1 failed" in browser.execute_script(
                "return document.getElementById('live').textContent"
            )

            hostile = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
            drawn = browser.execute_script(
                "view.failures[0].cause = view.script = view.workers[0].host = view.reason = arguments[0];"
                "view.warnings = [[view.now, arguments[0]]]; view.spans[0].text = arguments[0]; show(view);"
                "return [document.querySelectorAll('main img, main script').length, byId('failures').innerText]",
                hostile,
            )
            assert drawn[0] == 0 and hostile in drawn[1] and browser.title != "hacked"
            assert browser.execute_script("return window.opened") == "once"
            (job.out / "enough").touch()
            finished(job)
            until(lambda: text("state") == "succeeded" or "does not answer" in text("cut"), lambda: text("cut"))
        said = [line for line in browser.get_log("browser") if "net::ERR" not in line["message"]]
        assert not said, said  # nothing that the policy would have stopped
    finally:
        browser.quit()


def test_grafana_asks_for_metrics_that_there_are() -> None:
    there = {family.name for family in metrics.registry_of(EMPTY).collect()}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name for expression in asked for name in re.findall(r"\bswift_\w+", expression)}
    assert len(names) >= 12
    assert not {name for name in names if re.sub(r"_(total|info)$", "", name) not in there}

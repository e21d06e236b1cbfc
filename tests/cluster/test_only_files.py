"""An option that names a file never waits for a pipe, and never reads or writes a device."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared_core.checkpoint import history
from shared_core.checkpoint.history import Run
from shared_core.cli.job_options import find_section
from shared_core.cli.swiftctl import main as swiftctl
from shared_core.errors import ConfigError, NotAFile
from shared_core.events import EventLog, read_events
from shared_core.faults import inject
from shared_core.kinds import check_regular, open_fd
from shared_core.launcher.etcd import _user
from shared_core.system.secret import find

KINDS = ("pipe", "socket", "device", "folder")


@pytest.fixture(params=KINDS)
def odd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A path that is there and names no regular file."""
    path = tmp_path / "odd"
    if request.param == "device":
        yield Path("/dev/zero")
        return
    if request.param == "folder":
        path.mkdir()
    elif request.param == "pipe":
        os.mkfifo(path)
    with socket.socket(socket.AF_UNIX) as listener:
        if request.param == "socket":
            listener.bind(str(path))
        yield path


def _faults(path: Path) -> object:
    return inject.read_file(path)


def _history_read(path: Path) -> object:
    return history.read(path)


def _history_written(path: Path) -> object:
    return history.append(path, Run("a run"))


def _events(path: Path) -> object:
    return list(read_events(path))


def _secret(path: Path) -> object:
    return find(str(path))


def _password(path: Path) -> object:
    return _user({"user": "me", "password_file": str(path)})


def _option(path: Path) -> object:
    return check_regular(f"--option {path}", path)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "use",
    [_faults, _history_read, _history_written, _events, _secret, _password, _option],
    ids=lambda use: use.__name__,
)
def test_what_is_no_file_is_refused_at_once(use: Callable[[Path], object], odd: Path) -> None:
    with pytest.raises((ConfigError, NotAFile)):
        use(odd)


def test_the_check_sees_what_is_opened_and_not_what_was_there_before(tmp_path: Path) -> None:
    """A pipe that takes the file's place between a look at the path and its opening."""
    path = tmp_path / "file"
    path.write_text("")
    check_regular("--option", path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NotAFile):
        open_fd(path, os.O_RDONLY)


@pytest.mark.timeout(20)
def test_a_pipe_that_the_script_names_as_its_configuration_is_passed_over(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ds.json")
    (tmp_path / "other.json").write_text(json.dumps({"swift_recovery": {"seed": 3}}))
    words = [f"--deepspeed_config={tmp_path / name}" for name in ("ds.json", "other.json")]
    assert find_section(None, words) == {"seed": 3}


@pytest.mark.timeout(20)
def test_commands_refuse_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    for words in (["events", pipe], ["lab", "policy", "--history", pipe], ["report", pipe]):
        assert swiftctl([str(word) for word in words]), words
        assert "regular file" in capsys.readouterr().err, words


def test_events_may_go_to_the_null_device_and_to_no_other(tmp_path: Path) -> None:
    log = EventLog("/dev/null")
    log.emit("end")
    assert not log._told
    log = EventLog("/dev/zero")
    log.emit("end")
    assert log._told

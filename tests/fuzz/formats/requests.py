"""What an agent and its processes leave for each other: requests, answers, variables, small files."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from shared_core.checkpoint.command import Command
from shared_core.launcher.standby import Standby
from shared_core.protocol import worker_env
from shared_core.protocol.failure_policy import RaisedError
from shared_core.protocol.progress_file import ProgressFile, read_pace, read_progress
from shared_core.protocol.request import StartRequest
from shared_core.trackers.compat import committed_steps
from shared_core.worker.state.replicated import pack, unpack

from ..harness import Target, only_errors, stable
from ..json_values import plain_json, text_keys

words = st.text(max_size=8)
environments = st.fixed_dictionaries(
    {
        worker_env.JOB_DIR: st.just("/dev/shm/swift_x"),
        worker_env.STORE: st.sampled_from(["/dev/shm/swift_x/agent", "10.0.0.1:80#host.1"]),
        "RANK": st.integers(0, 9).map(str),
        "WORLD_SIZE": st.integers(1, 9).map(str),
        worker_env.CONFIG: st.just('{"seed": 1}'),
        worker_env.MACHINES: st.sampled_from(["", '["a:1#x", null]']),
        worker_env.COMMAND: st.just(Command.of("train.py", ["--lr", "1"]).to_json()),
        worker_env.RESIZED: st.sampled_from(["", worker_env.Resized(1, 4, (0, 2), 9).to_json()]),
        worker_env.GENERATION: st.integers(0, 9).map(str),
    }
)
errors = st.builds(
    lambda message, trace: {"message": {"message": message, "extraInfo": {"py_callstack": trace, "timestamp": "1"}}},
    words,
    st.sampled_from(["", 'Traceback:\n  File "/a/train.py", line 3, in main\n    x()\nValueError: x\n']),
)
descriptions = st.dictionaries(text_keys, plain_json, max_size=3)
steps = st.lists(st.integers(0, 99), min_size=1, max_size=3)


class _Said(Standby):
    """A standby that is not there and has said something already."""

    data = b""

    @staticmethod
    def spawn(channel: socket.socket, _env: dict[str, str]) -> int:
        channel.sendall(_Said.data[: 1 << 16])
        return os.getpid()


def _answers(data: bytes, _folder: Path) -> Any:
    _Said.data = data
    standby = _Said({})
    try:
        for token in range(3):
            standby.outstanding[token] = StartRequest(token, "script", "x", (), {}, 1)
        return [(request.token, pid) for request, pid in standby.answers()], standby.ready
    finally:
        standby._channel.close()  # close() would also kill the process, which is this one
        if standby.pidfd is not None:
            os.close(standby.pidfd)


def _answer(value: Any, _folder: Path) -> bytes:
    lines = [{"ready": True, "seconds": 0.5, "failed": {}, "threads": 1}]
    return b"".join(json.dumps(one).encode() + b"\n" for one in (*lines, *({"token": n, "pid": 7} for n in value)))


def _env(data: bytes, _folder: Path) -> Any:
    """Variables are text, whatever a JSON file says."""
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(data)
    if not isinstance(found, dict):
        return None
    here = worker_env.env({str(name): value for name, value in found.items() if isinstance(value, str)})
    return here.rank, here.machines, here.resized, here.command, here.prefix


def _progress(value: Any, folder: Path) -> bytes:
    file = ProgressFile(folder / "progress")
    file.boundary(value)
    file.waiting(True)
    return (folder / "progress").read_bytes()


def _read_progress(data: bytes, folder: Path) -> Any:
    (folder / "progress").write_bytes(data)
    return read_progress(folder / "progress"), read_pace(folder / "progress")


def _error_file(data: bytes, _folder: Path) -> Any:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    error = RaisedError.from_error_file(found)
    return error and (error.kind, error.place)


def _runs(value: list[int], _folder: Path) -> bytes:
    """A file as Weights & Biases writes it."""
    from wandb.proto import wandb_internal_pb2

    data = b":W&B\x24\x01\x00"
    for step in value:
        record = wandb_internal_pb2.Record()
        record.history.step.num = step
        entry = record.SerializeToString()
        data += struct.pack("<IHB", 0, len(entry), 1) + entry
    return data


def _read_runs(data: bytes, folder: Path) -> Any:
    (folder / "run.wandb").write_bytes(data)
    return list(committed_steps(str(folder / "run.wandb")))


def _message(data: bytes, _folder: Path | None = None) -> Any:
    return unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8))


def _packed(value: Any) -> bytes:
    return bytes(pack(value).numpy().tobytes())


TARGETS = [
    Target("requests.answers", st.lists(st.integers(0, 2), unique=True), _answer, _answers, only_errors),
    Target("requests.environment", environments, lambda value, _: json.dumps(value).encode(), _env, only_errors),
    Target("requests.progress", st.integers(0, 99), _progress, _read_progress, only_errors),
    Target("requests.error_file", errors, lambda value, _: json.dumps(value).encode(), _error_file, only_errors),
    Target("requests.tracker", steps, _runs, _read_runs, only_errors),
    Target("requests.message", descriptions, lambda value, _: _packed(value), _message, stable(_packed, _message)),
]

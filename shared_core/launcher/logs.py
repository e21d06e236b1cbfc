"""Log files and console prefixes of the workers, laid out as torchrun's; replacements append to the files."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from string import Template
from typing import TextIO

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: Of what a worker said last: lines, and bytes.
_LAST_LINES, _LAST_BYTES = 12, 4096


class WorkerLogs:
    """Where the output of each local rank goes, from the first worker to the last replacement.

    Args:
        name: role, the word in the default prefix ``[role0]:``.
        specs: torchelastic's log specification (redirects, tee, filter of ranks).
        workers: local world size.
        run_id: id of the rendezvous, part of the folder's name.
        prefix: template of a line's prefix with ``${role_name}``, ``${rank}`` and ``${local_rank}``; torchrun's default
            when None.
        ranks: global rank of each local rank.
        stdout_filters: lines of standard output that hold one of these are copied to ``filtered_stdout.log``.
    """

    def __init__(
        self,
        name: str,
        specs: LogsSpecs,
        workers: int,
        run_id: str,
        *,
        prefix: str | None = None,
        ranks: Sequence[int] = (),
        stdout_filters: Sequence[str] = (),
        stderr_filters: Sequence[str] = (),
    ) -> None:
        envs = {local: {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": "0"} for local in range(workers)}
        self._dest = specs.reify(envs)
        self._error_files = {local: env.get(ERROR_FILE, "") for local, env in envs.items()}
        prefixes: dict[int, str] | None = None
        if prefix:
            prefixes = {
                local: Template(prefix).safe_substitute(
                    role_name=name, rank=(ranks or range(workers))[local], local_rank=local
                )
                for local in range(workers)
            }
        self._filtered: list[TextIO] = []
        self._tails = [
            TailLog(name, self._dest.tee_stdouts, sys.stdout, prefixes),
            TailLog(name, self._dest.tee_stderrs, sys.stderr, prefixes),
        ]
        for path, tee, needles in (
            (self._dest.filtered_stdout, self._dest.tee_stdouts, stdout_filters),
            (self._dest.filtered_stderr, self._dest.tee_stderrs, stderr_filters),
        ):
            if needles:
                self._filtered.append(file := open(path, "w", errors="replace", buffering=1))  # noqa: SIM115
                self._tails.append(TailLog(name, tee, file, prefixes, log_line_filter=_holds_one_of(needles)))
        self._started = False

    def start(self) -> None:
        """Begin to copy teed files to the console, in threads. A second call does nothing."""
        if not self._started:
            self._started = True
            for tail in self._tails:
                tail.start()

    def stdout(self, local_rank: int) -> str:
        """File for standard output; empty for the console."""
        return self._dest.stdouts[local_rank]

    def stderr(self, local_rank: int) -> str:
        return self._dest.stderrs[local_rank]

    def error_file(self, local_rank: int, start: int) -> str:
        """Where the ``start``-th worker of a rank writes its exception; later ones to ``error.{start}.json``."""
        path = self._error_files[local_rank]
        return str(Path(path).with_suffix(f".{start}.json")) if path and start else path

    @property
    def used(self) -> bool:
        """Whether anything but error files is written."""
        return any(path and path != os.devnull for path in (*self._dest.stdouts.values(), *self._dest.stderrs.values()))

    def stop(self) -> None:
        if self._started:
            for tail in self._tails:
                tail.stop()
        for file in self._filtered:
            file.close()
        sys.stdout.flush()


def last_words(trace: str, stderr: str) -> str:
    """The end of a failed worker's traceback, else of what it wrote to its file for standard error; empty if there is
    neither, or that was the console.
    """
    text = trace
    if not trace and stderr:
        with suppress(OSError), open(stderr, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    return "\n".join(text.rstrip().splitlines()[-_LAST_LINES:])[-_LAST_BYTES:]


def _holds_one_of(needles: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in needles)

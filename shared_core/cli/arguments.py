"""Command lines that are read strictly: a wrong word gives one line, which names the flag and what is allowed."""

from __future__ import annotations

import argparse
import copy
import difflib
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, NoReturn

from shared_core.events import visible
from shared_core.kinds import LONGEST_S, Number, Whole
from shared_core.versions import installed

#: More workers on a machine than any has; each is a process.
_WORKERS = 4096


#: Name of the distribution that the packages come from.
DISTRIBUTION = "swift-recovery"


class Parser(argparse.ArgumentParser):
    """A parser that prints no usage with an error; ``--help`` does. Has ``--version`` where :meth:`tell_version` is
    called.
    """

    _brief: argparse.ArgumentParser | None = None

    def tell_version(self) -> None:
        """Add ``--version``, which prints the program's name and version and ends."""
        self.add_argument("--version", action=_TellVersion, nargs=0, help="print the version and exit")

    def tell_briefly(self, usage: str, groups: Mapping[str, Sequence[str]]) -> None:
        """Let ``--help`` print some options, each with its first sentence and its default; ``--help-all`` prints
        everything. ``groups``: by their title, the destinations of these options.
        """
        by_name = {action.dest: action for action in self._actions}
        self._brief = argparse.ArgumentParser(
            prog=self.prog, usage=usage, description=self.description, add_help=False, formatter_class=_Wide
        )
        for title, names in groups.items():
            group = self._brief.add_argument_group(title)
            for action in (by_name[name] for name in names):
                shown = copy.copy(action)
                shown.option_strings = [each for each in action.option_strings if "_" not in each]
                text = str(action.help).strip()
                shown.help = re.split(r"(?<!e\.g)\. (?=\w)", text)[0].rstrip(".")
                if default := re.search(r"Default: (\w+)\.$", text):
                    shown.help += f" [{default[1]}]"
                if action.choices is not None:
                    shown.metavar = "MODE"
                    shown.help = ", ".join(map(str, action.choices))
                group._group_actions.append(shown)
        self._brief.epilog = f"All options, torchrun's too: {self.prog} --help-all"
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")

    def print_help(self, file: Any = None) -> None:
        """The short help where there is one."""
        if self._brief is None:
            super().print_help(file)
        else:
            self._brief.print_help(file)

    def error(self, message: str) -> NoReturn:
        """End with status 2 and one line."""
        unknown = message.removeprefix("unrecognized arguments: ").partition(" ")[0].partition("=")[0]
        close = difflib.get_close_matches(unknown, self._option_string_actions, n=1)
        if unknown.startswith("-") and close:
            message += f"; did you mean {close[0]}?"
        self.exit(2, f"{self.prog.split()[0]}: {one_line(message)}; see {self.prog} --help\n")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As ever; a default that the environment has set must be one of the choices too."""
        found = super().parse_args(args, namespace)
        for action in self._actions:
            value = getattr(found, action.dest, None)
            if (
                action.option_strings
                and action.choices is not None
                and value is not None
                and value not in action.choices
            ):
                allowed = ", ".join(map(repr, action.choices))
                self.error(f"argument {'/'.join(action.option_strings)}: must be one of {allowed}, got {value!r}")
        return found


class _Wide(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=max(100, shutil.get_terminal_size().columns - 2))


class _TellVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        # The sources of a checkout may not be installed.
        print(parser.prog.split()[0], installed(DISTRIBUTION) or "(not installed)")
        parser.exit(0)


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(parser.format_help(), end="")
        parser.exit(0)


def one_line(message: object) -> str:
    """A message without line ends and other characters that a terminal acts on."""
    return visible(" ".join(line.strip() for line in str(message).splitlines()))


def _typed(read: Callable[[Any], Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def whole(least: int = 0, most: int | None = None) -> Callable[[str], int]:
    """The ``type`` of an argument that is a whole number."""
    return _typed((Whole(least) if most is None else Whole(least, most)).read)


def number(least: float = 0.0, most: float = LONGEST_S, *, above: bool = False) -> Callable[[str], float]:
    """The ``type`` of an argument that is a finite number."""
    return _typed(Number(least, above, most).read)


def machines(text: str) -> str:
    """``--nnodes``: N or MIN:MAX; stays text, as torchrun reads it."""
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", text)
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise argparse.ArgumentTypeError(f"must be a number of machines or MIN:MAX, at least 1, got {text!r}")
    return text


def workers(text: str) -> str:
    """``--nproc-per-node``: a number or the name of a device; stays text, as torchrun reads it."""
    from torch.distributed.run import determine_local_world_size

    allowed = f"must be at least 1 and at most {_WORKERS}, or one of auto, cpu, gpu, xpu"
    try:
        count = determine_local_world_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}: {error}") from error
    if not 1 <= count <= _WORKERS:
        raise argparse.ArgumentTypeError(f"{allowed}, got {text!r}")
    return text


def _matching(pattern: str, wanted: str) -> Callable[[str], str]:
    """The ``type`` of an argument that stays text."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"must be {wanted}, got {text!r}")
        return text

    return check


def signals(text: str) -> str:
    """``--signals-to-handle``; stays text."""
    for name in text.split(","):
        if name.strip() not in signal.Signals.__members__:
            raise argparse.ArgumentTypeError(f"must be signals such as SIGTERM,SIGINT, got {text!r}")
    return text


def event_handler(text: str) -> str:
    """``--event-log-handler``: one that torchelastic knows."""
    from torch.distributed.elastic.events.handlers import get_logging_handler

    try:
        get_logging_handler(text)
    except KeyError:
        raise argparse.ArgumentTypeError(f"must be null, console or one that is registered, got {text!r}") from None
    return text


def rendezvous(text: str) -> str:
    """``--rdzv-conf``: KEY=VALUE,...; stays text."""
    times = {"join_timeout": Number(above=True), "timeout": Number(above=True), "last_call_timeout": Number()}
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (word.strip() for word in pair.partition("="))
        if not key or not value:
            raise argparse.ArgumentTypeError(f"must be KEY=VALUE,KEY=VALUE, got {text!r}")
        if key in times:
            try:
                times[key].read(value)
            except ValueError as error:
                raise argparse.ArgumentTypeError(f"{key} {error}") from error
    return text


def logs_specs(text: str) -> str:
    """``--logs-specs``: an entry point."""
    known = sorted(entry_points(group="torchrun.logs_specs").names)
    if text not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known) or '(none is installed)'}, got {text!r}")
    return text


_STREAMS = _matching(
    "[0-3]|[0-9]+:[0-3](,[0-9]+:[0-3])*",
    "0 (none), 1 (stdout), 2 (stderr), 3 (both), or such by rank as 0:1,1:3",
)
#: Types of torchrun's flags, which torchrun reads later or not at all.
TORCHRUN: dict[str, Callable[[str], Any]] = {
    "nnodes": machines,
    "nproc_per_node": workers,
    "rdzv_conf": rendezvous,
    "max_restarts": whole(),
    "monitor_interval": number(above=True),
    "event_log_handler": event_handler,
    "logs_specs": logs_specs,
    "redirects": _STREAMS,
    "tee": _STREAMS,
    "local_ranks_filter": _matching("([0-9]+(,[0-9]+)*)?", "a list of local ranks such as 0,1"),
    "node_rank": whole(),
    "master_port": whole(0, 65535),
    "signals_to_handle": signals,
    "shutdown_timeout": whole(0, int(LONGEST_S)),
}

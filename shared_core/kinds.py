"""Kinds of values that users give, in code, files, variables or command lines, and what is said of wrong ones."""

from __future__ import annotations

import errno
import math
import os
import reprlib
import stat
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, BinaryIO

from shared_core.errors import ConfigError, NotAFile

#: Largest whole number that a file, a socket or another process takes.
MOST = 2**63 - 1
#: Longest time, in seconds; more overflows the system's counters.
LONGEST_S = 1e9
#: What is said of a path that names something else.
_NOT_REGULAR = "not a regular file"
_FOLDER = "it is a directory, not a regular file"
_OTHERS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Whole:
    """Whole numbers from ``least`` to ``most``."""

    least: int = 0
    most: int = MOST

    def read(self, value: Any) -> int:
        """``value`` as such a number; text and floats without a fraction count, too. Raises ValueError for all else."""
        found = None
        if isinstance(value, str):
            try:
                found = int(value)
            except ValueError:
                found = None
        elif isinstance(value, bool):
            found = None
        elif isinstance(value, Integral) or (isinstance(value, float) and value.is_integer()):
            found = int(value)
        if found is None or not self.least <= found <= self.most:
            wanted = "a whole number" if self.least < 0 else f"a whole number of at least {self.least}"
            limit = f", at most {self.most}" if self.most != MOST or (found or 0) > self.most else ""
            raise _wrong(wanted + limit, value)
        return found


@dataclass(frozen=True)
class Number:
    """Finite numbers from ``least`` to ``most``, ``least`` itself left out if they must be ``above`` it."""

    least: float = 0.0
    above: bool = False
    most: float = LONGEST_S

    def read(self, value: Any) -> float:
        """``value`` as such a number; text counts, too. Raises ValueError for all else."""
        found = math.nan
        if isinstance(value, str) or (isinstance(value, Real) and not isinstance(value, bool)):
            try:
                found = float(value)
            except (ValueError, OverflowError):
                found = math.nan
        if not math.isfinite(found) or not self.least <= found <= self.most or (self.above and found == self.least):
            limit = f", at most {self.most:g}" if self.most != LONGEST_S or found > self.most else ""
            raise _wrong(f"a finite number {'above' if self.above else 'of at least'} {self.least:g}{limit}", value)
        return found


@dataclass(frozen=True)
class Truth:
    def read(self, value: Any) -> bool:
        """``value`` as such; 0 and 1 count, too, and so do words. Raises ValueError for all else."""
        word = str(value).lower() if isinstance(value, str | Integral) else ""
        if word not in _YES + _NO:
            raise _wrong("true or false", value)
        return word in _YES


@dataclass(frozen=True)
class Choice:
    allowed: tuple[str, ...]

    def read(self, value: Any) -> str:
        """``value``, if it is one of the words. Raises ValueError for all else."""
        if not isinstance(value, str) or value not in self.allowed:
            raise _wrong(f"one of {', '.join(map(repr, self.allowed))}", value)
        return value


@dataclass(frozen=True)
class WholeOrAuto:
    """Whole numbers from 0, or the word ``auto``."""

    def read(self, value: Any) -> int | str:
        """``value`` as such. Raises ValueError for all else."""
        if value == "auto":
            return "auto"
        try:
            return Whole().read(value)
        except ValueError:
            raise _wrong("'auto' or a whole number of at least 0", value) from None


@dataclass(frozen=True)
class Port:
    """Ports to listen at, 0 for a free one, or None for none."""

    def read(self, value: Any) -> int | None:
        """``value`` as such. Raises ValueError for all else."""
        return None if value is None else Whole(0, 65535).read(value)


@dataclass(frozen=True)
class NamedPlace:
    """The name of a file or folder, or None for none; ``what`` it must be, for errors."""

    what: str

    def read(self, value: Any) -> str | None:
        """``value`` as text. Raises ValueError where it can be no name."""
        if value is None:
            return None
        if not isinstance(value, str | os.PathLike) or not (name := os.fspath(value)) or "\0" in str(name):
            raise _wrong(self.what, value)
        return str(name)


Kind = Whole | WholeOrAuto | Number | Truth | Choice | Port | NamedPlace


def whole_of_environment(name: str, default: int) -> int:
    """The whole number in a variable, ``default`` where it is not set or empty; else ConfigError."""
    try:
        return Whole().read(os.environ.get(name) or default)
    except ValueError as error:
        raise ConfigError(f"the environment variable {name} {error}: unset it, or correct it") from None


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read it, without waiting. NotAFile for a pipe, a device, a folder or a socket."""
    return os.fdopen(open_fd(path, os.O_RDONLY), "rb")


def open_fd(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, null: bool = False) -> int:
    """A descriptor of a regular file; what is no file is opened without waiting, looked at and closed.

    ``flags`` are of ``os.open``; close-on-exec and non-blocking are added. ``mode`` is that of a new file. With
    ``null``, ``/dev/null`` is let through. Raises NotAFile for a pipe, a device, a folder or a socket.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a pipe that nobody reads
            raise NotAFile(errno.EINVAL, _NOT_REGULAR, os.fspath(path)) from error
        if error.errno == errno.EISDIR:
            raise NotAFile(errno.EISDIR, _FOLDER, os.fspath(path)) from error
        raise
    found = os.fstat(fd)
    if not is_regular(found, null=null):
        os.close(fd)
        if stat.S_ISDIR(found.st_mode):
            raise NotAFile(errno.EISDIR, _FOLDER, os.fspath(path))
        raise NotAFile(errno.EINVAL, _NOT_REGULAR, os.fspath(path))
    return fd


def is_regular(found: os.stat_result, *, null: bool = False) -> bool:
    return stat.S_ISREG(found.st_mode) or (
        null and stat.S_ISCHR(found.st_mode) and found.st_rdev == os.stat(os.devnull).st_rdev
    )


def check_regular(option: str, path: str | os.PathLike[str], *, null: bool = False) -> None:
    """Raise ConfigError for an option that names something that is there and is no regular file.

    ``option``: with its value, as the user gave it. ``null``: ``/dev/null`` will do, too.
    """
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} must name a file: {getattr(error, 'strerror', None) or error}") from error
    if not is_regular(found, null=null):
        what = next((text for is_one, text in _OTHERS if is_one(found.st_mode)), "something else")
        or_null = ", or /dev/null for none" if null else ""
        raise ConfigError(f"{option} must name a regular file{or_null}, and it is {what}")


def check_length(option: str, path: str | os.PathLike[str]) -> None:
    """Raise ConfigError for a path that is too long for the file system; ``option`` with its value, for people."""
    try:
        os.lstat(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{option:.200}: its name, or a part of it, is too long for the file system") from error


def check_host(option: str, host: str) -> None:
    """Raise ConfigError for a name that can be no machine's; ``option`` with its value, for people."""
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ConfigError(f"{option:.200}: that is no name or address of a machine") from error


def no_folder(path: str | os.PathLike[str]) -> Path | None:
    """What is in the way of a folder at ``path``: the nearest thing above or at it that is there and no folder."""
    found = Path(path).absolute()
    while not os.path.lexists(found) and found != found.parent:
        found = found.parent
    return None if found.is_dir() else found


def _wrong(wanted: str, value: Any) -> ValueError:
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return ValueError(f"must be {wanted}, got {short.repr(value)}")

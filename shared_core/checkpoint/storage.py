"""Where checkpoints lie: a local folder, or anything that fsspec reaches by a URL. Does not import torch.

A file in a local folder is written under a temporary name, flushed to the device and renamed, and its folder is flushed
too. Object stores have no rename; there a file that was cut off fails its checksum, which is written after it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared_core.errors import ConfigError, MissingExtra, StorageFull, SwiftError
from shared_core.faults import inject
from shared_core.kinds import no_folder, open_regular
from shared_core.resources import FULL, write_all

TEMPORARY = ".tmp-"
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTCONN, errno.ENODEV})
#: Files are read in pieces of this size, in bytes.
CHUNK = 4 << 20
#: Written bytes are flushed to the device at least so often: the system then holds few that are not there yet.
_FLUSH = 64 << 20


def operation() -> None:
    """Called before every file operation on storage: a place where a test may kill."""
    inject.point("checkpoint.file")


def cause_of(error: BaseException) -> str:
    """Why something could not be written, in one word: ``full``, ``read-only``, ``gone`` or ``error``."""
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, StorageFull) or number in FULL:
        return "full"
    if number in _READ_ONLY:
        return "read-only"
    return "gone" if number in _GONE else "error"


class Storage(Protocol):
    """Names are relative and have at most one slash: ``step-0000000040/rank0``."""

    @property
    def root(self) -> str:
        """The folder or URL, for messages."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview], size: int) -> str:
        """Make a file of ``size`` bytes: whole and durable when this returns. Returns its SHA-256 in hexadecimal.

        Raises:
            StorageFull: no room; what was begun is removed.
            OSError: anything else.
        """

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file in pieces; raises FileNotFoundError."""

    def names(self, folder: str = "") -> list[str]:
        """Names in a folder, temporary files included; empty where it is absent."""

    def exists(self) -> bool:
        """Whether the folder itself is there."""

    def size(self, name: str) -> int:
        """Of a file, in bytes; raises FileNotFoundError."""

    def remove(self, name: str) -> None:
        """Remove a file; does nothing where there is none, or where its folder is a link."""

    def remove_folder(self, folder: str, first: str = "") -> None:
        """Remove the files of a folder, and the folder if nothing else is in it, as far as possible.

        No link is followed: a link in place of the folder is removed itself, and its target stays. ``folder`` is empty
        for the storage itself, which is removed only if it is empty. The file ``first`` is removed before all others.
        """

    def is_link(self, folder: str = "") -> bool:
        """Whether a folder, or the storage itself, is a link."""

    def free(self) -> int | None:
        """Bytes that can still be written; None if unknown."""

    def local(self, name: str = "") -> Path | None:
        """The path of a file; None where the storage is not local."""


@dataclass(frozen=True)
class LocalStorage:
    """A local folder, made when something is written; ``mode``: permissions of new files."""

    root: str
    mode: int = 0o600

    def write(self, name: str, chunks: Iterable[bytes | memoryview], size: int) -> str:
        path = Path(self.root, name)
        temporary = path.with_name(f"{TEMPORARY}{path.name}-{uuid.uuid4().hex}")
        written = 0
        try:
            operation()
            new = [each for each in path.parents if not each.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)  # two ranks may do so at once
            for each in new:
                operation()
                _sync_folder(each.parent)
            try:
                digest = hashlib.sha256()
                operation()
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.mode)
                try:
                    for chunk in chunks:
                        operation()
                        write_all(fd, chunk)
                        digest.update(chunk)
                        written += len(chunk)
                        if written % _FLUSH < len(chunk):
                            os.fdatasync(fd)
                    operation()
                    os.fsync(fd)
                finally:
                    os.close(fd)
                operation()
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
                raise
            operation()
            _sync_folder(path.parent)
            return digest.hexdigest()
        except OSError as error:
            if error.errno in FULL:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # only if it is empty
                raise _no_room(size, str(path), error) from error
            raise

    def chunks(self, name: str) -> Iterator[bytes]:
        with open_regular(os.path.join(self.root, name)) as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def names(self, folder: str = "") -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self.root, folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def size(self, name: str) -> int:
        return os.stat(os.path.join(self.root, name)).st_size

    def remove(self, name: str) -> None:
        operation()
        folder, _, file = name.rpartition("/")
        if not self.is_link(folder):
            with contextlib.suppress(FileNotFoundError), self._opened(folder) as fd:
                os.unlink(file, dir_fd=fd)

    def remove_folder(self, folder: str, first: str = "") -> None:
        operation()
        with contextlib.suppress(OSError):
            if not folder:
                os.rmdir(self.root)
                return
            with self._opened("") as parent:
                if self.is_link(folder):
                    os.unlink(folder, dir_fd=parent)
                    return
                with self._opened(folder) as fd:
                    for name in sorted(os.listdir(fd), key=lambda each: (each != first, each)):
                        operation()
                        with contextlib.suppress(OSError):  # a folder in it is not ours
                            os.unlink(name, dir_fd=fd)
                operation()
                os.rmdir(folder, dir_fd=parent)

    def is_link(self, folder: str = "") -> bool:
        return os.path.islink(os.path.join(self.root.rstrip("/"), folder).rstrip("/"))

    @contextlib.contextmanager
    def _opened(self, folder: str) -> Iterator[int]:
        """Descriptor of a folder in the storage, or of the storage itself; raises OSError for a link or none."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        fds = [os.open(self.root.rstrip("/") or "/", flags)]
        try:
            if folder:
                fds.append(os.open(folder, flags, dir_fd=fds[0]))
            yield fds[-1]
        finally:
            for fd in fds:
                os.close(fd)

    def free(self) -> int | None:
        path = Path(self.root).absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def local(self, name: str = "") -> Path | None:
        return Path(self.root, name)


@dataclass(frozen=True)
class UrlStorage:
    """Files behind an fsspec URL. A file that was cut off fails its checksum; nothing is renamed.

    Each operation connects if needed, again after each failure: a server that is down now may be up later. Whatever the
    library behind the URL raises becomes an ``OSError``.
    """

    root: str

    def write(self, name: str, chunks: Iterable[bytes | memoryview], size: int) -> str:
        digest = hashlib.sha256()
        with self._at(name) as (files, path):
            try:
                operation()
                files.makedirs(path.rpartition("/")[0], exist_ok=True)
                operation()
                with files.open(path, "wb") as file:
                    for chunk in chunks:
                        operation()
                        file.write(chunk)
                        digest.update(chunk)
                    operation()
                operation()
            except OSError as error:
                if error.errno in FULL:
                    with contextlib.suppress(OSError):
                        files.rm_file(path)
                    raise _no_room(size, f"{self.root}/{name}", error) from error
                raise
        return digest.hexdigest()

    def chunks(self, name: str) -> Iterator[bytes]:
        with self._at(name) as (files, path), files.open(path, "rb", cache_type="none") as file:
            while chunk := file.read(CHUNK):
                yield bytes(chunk)

    def names(self, folder: str = "") -> list[str]:
        with self._at(folder) as (files, path):
            files.invalidate_cache()
            try:
                found = files.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def exists(self) -> bool:
        with self._at("") as (files, path):
            files.invalidate_cache()
            return bool(files.exists(path))

    def size(self, name: str) -> int:
        with self._at(name) as (files, path):
            return int(files.size(path))

    def remove(self, name: str) -> None:
        operation()
        with self._at(name) as (files, path), contextlib.suppress(FileNotFoundError):
            files.rm_file(path)

    def remove_folder(self, folder: str, first: str = "") -> None:
        operation()
        with contextlib.suppress(OSError), self._at(folder) as (files, path):
            if folder and _is_link(files, path):
                files.rm_file(path)
                return
            for name in sorted(self.names(folder) if folder else (), key=lambda each: (each != first, each)):
                operation()
                with contextlib.suppress(OSError):  # a folder in it is not ours
                    files.rm_file(f"{path}/{name}")
            files.rmdir(path)

    def is_link(self, folder: str = "") -> bool:
        with self._at(folder) as (files, path):
            return _is_link(files, path)

    def free(self) -> int | None:
        return None

    def local(self, name: str = "") -> Path | None:
        return None

    @contextlib.contextmanager
    def _at(self, name: str) -> Iterator[tuple[Any, str]]:
        """fsspec's file system, and the path of a file there."""
        try:
            files, path = _file_system(self.root)
            yield files, f"{path.rstrip('/')}/{name}" if name else path
        except (SwiftError, FileNotFoundError, NotADirectoryError):
            raise
        except Exception as error:
            _forget(self.root)
            if isinstance(error, OSError):
                raise
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", self.root) from error


def absolute(where: str | os.PathLike[str]) -> str:
    """Absolute path of a folder; a URL as it is."""
    text = os.fspath(where)
    return text if "://" in text else os.path.abspath(text)


def open_storage(where: str | os.PathLike[str]) -> Storage:
    """Storage for a local folder or a URL such as ``s3://bucket/run``; ``file://`` is a local folder. Does not connect.

    Raises:
        MissingExtra: a URL, and fsspec or what it needs for it is not installed.
        ConfigError: fsspec does not know this kind of URL.
    """
    text = os.fspath(where)
    if text.startswith("file://"):
        return LocalStorage(text.removeprefix("file://"))
    if "://" not in text:
        return LocalStorage(text)
    _check_kind(text)
    return UrlStorage(text)


def check_place(option: str, where: str) -> Storage:
    """The storage of an option's value; it need not exist yet.

    Raises:
        ConfigError: it cannot be a folder, or fsspec does not know this kind of URL; the message names ``option``.
        MissingExtra: as :func:`open_storage`.
    """
    storage = open_storage(where)
    local = storage.local()
    if local is not None and (found := no_folder(local)):
        raise ConfigError(f"{option}={where!r} must be a folder or a URL: {found} is not a folder")
    return storage


def _check_kind(url: str) -> None:
    """Check, offline, that fsspec knows such URLs and has what it needs. Raises as :func:`open_storage`."""
    try:
        import fsspec
    except ImportError as error:
        raise MissingExtra(
            f"checkpoints at {url} need fsspec: pip install 'swift-recovery[all]', or set checkpoint.dir to a "
            "local folder"
        ) from error
    try:
        for kind in _kinds(url):
            fsspec.get_filesystem_class(kind)
    except ImportError as error:
        raise MissingExtra(f"checkpoints at {url} need a package that fsspec does not find: {error}") from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.dir={url!r}: {error}") from error


def _kinds(url: str) -> list[str]:
    """Of a URL, or of the parts of a chained one such as ``simplecache::s3://bucket``."""
    return [part.partition("://")[0] for part in url.split("::")]


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL (it keeps one for each), and the path in it. May connect."""
    _check_kind(url)
    import fsspec

    try:
        files, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise MissingExtra(f"checkpoints at {url} need a package that fsspec does not find: {error}") from error
    except ValueError as error:
        raise ConfigError(f"checkpoint.dir={url!r}: {error}") from error
    return files, path


def _forget(url: str) -> None:
    """Have the next call make a new file system: the connection of this one may be broken for good."""
    import fsspec

    for kind in _kinds(url):
        fsspec.get_filesystem_class(kind).clear_instance_cache()


def _is_link(files: Any, path: str) -> bool:
    try:
        found = files.info(path)
    except OSError:
        return False
    return bool(found.get("islink")) or found.get("type") == "link"


def _no_room(size: int, where: str, error: OSError) -> StorageFull:
    return StorageFull(
        f"no room to write {size} bytes to {where} ({error.strerror}); earlier checkpoints are as they were: make "
        "room, or set checkpoint.dir to a larger device"
    )


def _sync_folder(folder: Path) -> None:
    """Make names in ``folder`` durable: a rename is only on the device once its folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

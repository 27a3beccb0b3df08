"""Files appear whole or not at all: written under another name, flushed, then renamed. And how they are read."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import stat
from pathlib import Path
from typing import Any

SUFFIX = ".partial"
LARGEST_JSON = 256 << 20  # bytes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What code raises that is handed what a file names and does not hold.
FALSE_CLAIMS = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
)  # fmt: skip


def write_whole(
    path: str | os.PathLike[str], content: bytes | str, keep: str | os.PathLike[str] | None = None
) -> Path:
    """Write a file so that a reader sees the old content or the new one, never a part; returns its path.

    ``keep`` names a file that gets the old content, whole as well. Where the disk is full nothing changes, and the
    error says so.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_whole(path, "whole").read_text()
    'whole'
    >>> before = path.with_name("before.txt")
    >>> write_whole(path, "new", keep=before).read_text(), before.read_text()
    ('new', 'whole')
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial, old = _partial(target), None
    raw = content.encode() if isinstance(content, str) else content
    try:
        with open(partial, "xb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and target.exists():
            old = _second_name(target, Path(keep))
        os.replace(partial, target)
        if keep is not None and old is not None:
            os.replace(old, keep)  # last: at every moment there are two files, and each is whole
            old.unlink(missing_ok=True)  # two names of one file are not renamed: both would stay
    except BaseException as error:
        for each in (partial, old):
            if each is not None:
                with contextlib.suppress(OSError):
                    os.unlink(each)
        if isinstance(error, OSError) and error.errno in FULL:
            raise no_room(error, target, len(raw)) from error
        raise
    return target


def read_whole(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The bytes of an ordinary file of at most so many bytes; an OSError says what else it is.

    A pipe would wait for its writer and a device need not end: neither is opened.

    >>> import tempfile
    >>> read_whole(write_whole(Path(tempfile.mkdtemp()) / "a.txt", "whole"))
    b'whole'
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        what = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe or a device"
        raise OSError(f"{str(path)!r} is {what}, not a file")
    if most is not None and found.st_size > most:
        raise OSError(f"{str(path)!r} has {found.st_size:,} bytes, and {most:,} are the most for such a file")
    try:
        with open(path, "rb") as file:
            return file.read()
    except MemoryError:
        raise OSError(f"{str(path)!r} has {found.st_size:,} bytes, more than there is memory for") from None


def read_text(path: str | os.PathLike[str], most: int | None = None) -> str:
    """The UTF-8 text of an ordinary file; a UnicodeDecodeError, which is a ValueError, where it is none."""
    return read_whole(path, most).decode("utf-8")


def read_json(path: str | os.PathLike[str], most: int = LARGEST_JSON) -> Any:
    """The content of a JSON file; what is wrong with it is an OSError or a ValueError.

    >>> import tempfile
    >>> read_json(write_whole(Path(tempfile.mkdtemp()) / "a.json", "[1]"))
    [1]
    """
    return parse_json(read_text(path, most))


def parse_json(text: str) -> Any:
    """``json.loads``, with a ValueError also for what is nested too deeply.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: its brackets are nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def formula_safe(value: Any) -> Any:
    """A cell of a CSV file: a text that a spreadsheet would run as a formula gets an apostrophe before it.

    >>> formula_safe("=cmd|' /C calc'!A0"), formula_safe("-1"), formula_safe("cat"), formula_safe(-1)
    ("'=cmd|' /C calc'!A0", '-1', 'cat', -1)
    """
    if not isinstance(value, str) or value[:1] not in ("=", "+", "-", "@", "\t", "\r"):
        return value
    try:
        float(value)  # -1 and +1e3 are numbers, and stay so
    except ValueError:
        return f"'{value}"
    return value


def shortened(text: object, most: int = 200) -> str:
    """A text for a message: its beginning, where it is long; what cannot be printed escaped.

    >>> shortened("a" * 300, 3), shortened("a\\nb")
    ('aaa...', 'a\\\\nb')
    """
    found = str(text)
    kept = found if len(found) <= most else found[:most] + "..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in kept)


def no_room(error: OSError, target: Path, size: int) -> OSError:
    """The error of a disk that is full, with what it was to take and what to do."""
    why = {errno.EDQUOT: "your quota is used up", errno.EFBIG: "files may not be so large here (ulimit -f)"}
    free = ""
    with contextlib.suppress(OSError):
        free = f", {shutil.disk_usage(target.parent).free:,} are free"
    return OSError(
        error.errno,
        f"{why.get(error.errno or 0, 'the disk is full')}: no room for {size:,} bytes{free}. What was there before is "
        f"whole; make room and run the same again (a training run with a folder goes on with resume=True, --resume)",
        str(target),
    )


def _second_name(target: Path, keep: Path) -> Path | None:
    """Give the content a second name for a while; None where it has its new name already."""
    link = _partial(keep)
    try:
        os.link(target, link)
        return link
    except OSError:  # a file system without hard links: for a moment there is only the kept file
        os.replace(target, keep)
        return None


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{SUFFIX}")

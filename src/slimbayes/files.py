"""Files appear whole or not at all: written under another name, flushed, then renamed. And how they are read."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

SUFFIX = ".partial"
LARGEST_JSON = 256 << 20  # bytes


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> Path:
    """Write a file so that a reader sees the old content or the new one, never a part; returns its path.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.txt"
    >>> write_whole(path, "whole").read_text()
    'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        with open(partial, "xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
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

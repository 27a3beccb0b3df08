"""Files appear whole or not at all: written under another name, flushed, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path

SUFFIX = ".partial"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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

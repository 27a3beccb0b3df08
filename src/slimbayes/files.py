"""Files appear whole or not at all: written under another name, flushed, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

SUFFIX = ".partial"


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

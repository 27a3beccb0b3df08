"""What packed files unpack to, before they are unpacked: a few kilobytes may claim or hold all of memory."""

from __future__ import annotations

import math
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from slimbayes.containers.datasets import DataError

LARGEST_RATIO = 100  # of unpacked to packed bytes, for what is
LARGEST_ANYWAY = 1 << 30  # bytes: larger than this when unpacked
LARGEST_GZIP = 512 << 20  # bytes of a gzipped file that is unpacked at once
LARGEST_LINE = 1 << 24  # characters of one line of a packed table


def check_archive(path: Path, keys: tuple[str, ...]) -> None:
    """Raise a DataError unless the arrays of an .npz file are what their headers claim, and in proportion to the file.

    Sizes are compared with those in the archive's own list, which bounds what zipfile unpacks.
    """
    check_ordinary(path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        wanted = [members[key] for key in keys if key in members]
        for info in wanted:
            with archive.open(info) as member:
                _check_claim(path, info, member)
    total, packed = sum(info.file_size for info in wanted), sum(info.compress_size for info in wanted)
    if out_of_proportion(total, min(packed, path.stat().st_size)):
        raise DataError(
            f"{path}: its arrays unpack to {total:,} bytes, more than {LARGEST_RATIO} times the file: if you trust it, "
            f"unpack it yourself and save it with numpy.savez, which does not compress"
        )


def check_ordinary(path: Path) -> None:
    """Raise a DataError for a folder, and for a pipe or a device, which need not end."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"
        raise DataError(f"{path} is {what}: give a file")


def out_of_proportion(unpacked: int, packed: int) -> bool:
    """Whether so many bytes from so few are more than data have been seen to be packed.

    >>> out_of_proportion(1 << 33, 1 << 23), out_of_proportion(1 << 33, 1 << 30), out_of_proportion(1 << 20, 1)
    (True, False, False)
    """
    return unpacked > LARGEST_ANYWAY and unpacked > LARGEST_RATIO * packed


def _check_claim(path: Path, info: zipfile.ZipInfo, member: IO[bytes]) -> None:
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):  # later ones are for names of columns beyond Latin letters
        raise DataError(
            f"{path}: {info.filename!r} is of version {version} of .npy: save plain arrays of numbers"
        )
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if dtype.hasobject:
        raise DataError(
            f"{path}: {info.filename!r} is not a readable array but pickled objects, which may run code: save numbers"
        )
    claimed = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or claimed != info.file_size - member.tell():
        raise DataError(
            f"{path}: {info.filename!r} claims {dtype} {list(shape)}, {claimed:,} bytes, and has "
            f"{info.file_size - member.tell():,}: the file is damaged"
        )


def check_text(path: Path, name: str, array: np.ndarray[Any, Any]) -> None:
    """Raise a DataError for text whose numbers are no characters: NumPy takes them, and Python fails on them later."""
    if array.dtype.kind != "U" or array.dtype.itemsize == 0 or array.size == 0:
        return
    numbers = np.ascontiguousarray(array).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
    if int(numbers.max()) > 0x10FFFF:
        raise DataError(f"{path}: {name!r} is text with numbers that are no characters: the file is damaged")


def unpack(raw: bytes, path: Path) -> bytes:
    """The content of gzipped bytes; a DataError where they are damaged or unpack without measure.

    >>> import gzip
    >>> unpack(gzip.compress(b"abc"), Path("a.gz"))
    b'abc'
    """
    parts, size, rest = [], 0, raw
    try:
        while rest:  # a file may be several, one after the other
            member = zlib.decompressobj(wbits=31)
            content = member.decompress(rest, LARGEST_GZIP - size + 1)
            size += len(content)
            if size > LARGEST_GZIP:
                raise DataError(
                    f"{path}: it unpacks to more than {LARGEST_GZIP:,} bytes: get the original file"
                )
            if not member.eof:
                raise DataError(f"{path}: damaged gzip file (it ends too early): get it again")
            parts.append(content)
            rest = member.unused_data.lstrip(b"\0")
    except zlib.error as error:
        raise DataError(f"{path}: damaged gzip file ({error}): get it again") from error
    return b"".join(parts)


def lines(text: Any, path: Path) -> Iterator[str]:
    """The lines of a text that is unpacked as it is read; one without end is a DataError."""
    while line := text.readline(LARGEST_LINE):
        if len(line) == LARGEST_LINE and not line.endswith("\n"):
            raise DataError(f"{path}: a line of more than {LARGEST_LINE:,} characters: no such table")
        yield line

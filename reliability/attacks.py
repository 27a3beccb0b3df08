"""Hostile contents: what is put in the place of a file that a reader expects.

A payload is bytes, or a function that makes something else at a path: a folder, a pipe, a link. Pickles among them call
``canary``, which leaves a file behind if anything runs it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BOMB = 3072  # MB that a bomb unpacks to
Payload = bytes | Callable[[Path], None]
EVIL = "=cmd|'/C calc'!A0<script>alert(1)</script>\"'&{{7*7}}\x00\u202e"


class Canary:
    """Unpickled without a guard, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def _zip(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(descr: str, shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """A .npy file that says this of itself, whatever it holds."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content


def _torch_zip(canary: Path) -> bytes:
    return _zip(**{"archive/data.pkl": pickle.dumps(Canary(canary), 2), "archive/version": b"3\n"})


def zeros_zip(name: str, header: bytes, megabytes: int) -> bytes:
    """An archive with one member of so many megabytes of zeros, a thousandth of that in size."""
    file = io.BytesIO()
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open(name, "w", force_zip64=True) as member:
        member.write(header)
        for _ in range(megabytes):
            member.write(bytes(1 << 20))
    return file.getvalue()


def gzip_zeros(megabytes: int, first: bytes = b"") -> bytes:
    """So many megabytes of zeros, gzipped."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    parts = [packer.compress(first)] + [packer.compress(bytes(1 << 20)) for _ in range(megabytes)]
    return b"".join([*parts, packer.flush()])


def everywhere(canary: Path) -> dict[str, Payload]:
    """What is tried in the place of every file."""
    python = f"!!python/object/apply:os.system ['touch {canary}']\n"
    return {
        "pickle": pickle.dumps(Canary(canary), 4),
        "pickle, protocol 0": pickle.dumps(Canary(canary), 0),
        "torch.save": _torch_zip(canary),
        "gzipped pickle": gzip.compress(pickle.dumps(Canary(canary))),
        "pickle in npz": _npz_of(canary, "inputs"),
        "python code": f"import os; os.system('touch {canary}')\n".encode(),
        "YAML tag": python.encode(),
        "YAML tag inside": f"data: {python}".encode(),
        "empty": b"",
        "one byte": b"\x80",
        "zero bytes": bytes(1 << 20),
        "not UTF-8": b"\xff\xfe\x00\xd8" * 1000,
        "random": np.random.default_rng(0).bytes(100_000),
        "brackets": b"[" * 1_000_000,
        "braces": b'{"a":' * 200_000,
        "a number of 10^5 digits": b'{"format": ' + b"9" * 100_000 + b"}",
        "NaN and infinity": b'{"format": NaN, "version": Infinity, "config": -Infinity}',
        "a line of 50 MB": b"a," * (25 << 20),
        "markup": json.dumps({"format": EVIL, EVIL: EVIL}).encode(),
        "zip bomb": zeros_zip("inputs.npy", npy("<f8", (BOMB << 17,)), BOMB),
        "gzip bomb": gzip_zeros(BOMB),
        "a folder": lambda path: path.mkdir(),
        "a pipe": lambda path: os.mkfifo(path),
        "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path),
        "a link to nothing": lambda path: path.symlink_to(path.parent / "absent"),
        "a hole of 1 TB": _hole,
        "not to be read": _locked,
    }


def _npz_of(canary: Path, *names: str) -> bytes:
    raw = npy("|O", (1,), pickle.dumps([Canary(canary)]))
    return _zip(**{f"{name}.npy": raw for name in names})


def _hole(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def _locked(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def tensors(canary: Path) -> dict[str, Payload]:
    """safetensors files that lie about themselves."""

    def file(header: bytes, body: bytes = b"", length: int | None = None) -> bytes:
        return struct.pack("<Q", len(header) if length is None else length) + header + body

    def entry(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": offsets}

    def of(**entries: Any) -> bytes:
        return file(json.dumps(entries).encode(), bytes(64))

    once = b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    twice = b"{" + once + b"," + once + b"}"
    return {
        "header of 2^63 bytes": file(b"{}", length=2**63),
        "header of 2^64 - 1 bytes": file(b"{}", length=2**64 - 1),
        "header longer than the file": file(b"{}", length=10_000_000),
        "overlapping tensors": of(a=entry("F32", [16], [0, 64]), b=entry("F32", [8], [32, 64])),
        "a hole between tensors": of(a=entry("F32", [4], [0, 16]), b=entry("F32", [4], [48, 64])),
        "offsets after the end": of(a=entry("F32", [1 << 40], [0, 1 << 42])),
        "negative offsets": of(a=entry("F32", [16], [-64, 0])),
        "offsets the wrong way": of(a=entry("F32", [16], [64, 0])),
        "a shape that overflows": of(a=entry("F32", [1 << 62, 1 << 62], [0, 64])),
        "an empty shape that overflows": of(a=entry("F32", [0, 1 << 62, 1 << 62], [0, 0])),
        "a negative shape": of(a=entry("F32", [-4, -4], [0, 64])),
        "an unknown type": of(a=entry("PICKLE", [16], [0, 64])),
        "a type of half a byte": of(a=entry("F4", [128], [0, 64])),
        "a shape of text": of(a=entry("F32", "16", [0, 64])),
        "names twice": file(twice, bytes(16)),
        "metadata of numbers": of(__metadata__={"slimbayes": 1}, a=entry("F32", [16], [0, 64])),
        "metadata of brackets": of(__metadata__={"slimbayes": "[" * 100_000, "slimbayes-training": "[" * 100_000,
                                                 "slimbayes.sklearn": "[" * 100_000}, a=entry("F32", [16], [0, 64])),
        "metadata of 10^5 digits": of(__metadata__={"slimbayes": '{"format":' + "9" * 100_000 + "}"}),
        "99 MB of brackets": file(b"[" * 99_000_000),
        "99 MB of blanks": file(b"{" + b" " * 98_000_000 + b"}"),
        "a million names": file(json.dumps({f"t{i}": entry("U8", [0], [0, 0]) for i in range(300_000)}).encode()),
    }  # fmt: skip


def tar(*members: tuple[str, bytes, dict[str, Any]]) -> bytes:
    """A tar file of these members (name, content, what its header says otherwise)."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name, content, said in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in said.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content) if info.isreg() else None)
    return file.getvalue()


def _numbered(content: bytes, field: bytes) -> bytes:
    """A tar file whose first member's size is this, with a checksum that fits."""
    header = bytearray(content[:512])
    header[124:136] = field
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content[512:]


def shards(image: bytes) -> dict[str, Payload]:
    """Tar shards that reach outside, link, or never end."""
    label = ("k.cls", b"1", {})
    negative = b"\xff" * 12  # base-256: -1
    return {
        "path traversal": tar(("../../../tmp/k.png", image, {}), ("../../../tmp/k.cls", b"1", {})),
        "absolute names": tar(("/etc/k.png", image, {}), ("/etc/k.cls", b"0", {})),
        "symbolic link": tar(("k.png", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}), label),
        "hard link": tar(("k.png", b"", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}), label),
        "label by link": tar(("k.png", image, {}), ("k.cls", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/hosts"})),
        "device": tar(("k.png", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}), label),
        "pipe": tar(("k.png", b"", {"type": tarfile.FIFOTYPE}), label),
        "a size of 8 GB": _numbered(tar(("k.png", image, {}), label), b"77777777777\0"),
        "a negative size": _numbered(tar(("k.png", image, {}), label), negative),
        "a long name of 8 GB": _numbered(tar(("k.png", image, {"type": b"L"}), label), b"77777777777\0"),
        "a label of 10^5 digits": tar(("k.png", image, {}), ("k.cls", b"9" * 100_000, {})),
        "a label of 10^12": tar(("k.png", image, {}), ("k.cls", b"1000000000000", {})),
        "a negative label": tar(("k.png", image, {}), ("k.cls", b"-1", {})),
        "markup in names": tar((f"{EVIL[:40]}.png", image, {}), (f"{EVIL[:40]}.cls", b"1", {})),
        "a sparse member": tar(("k.png", image, {"type": tarfile.GNUTYPE_SPARSE}), label),
    }  # fmt: skip


def archives(canary: Path) -> dict[str, Payload]:
    """npz files with pickles, bombs, and headers that claim more than there is."""
    labels = npy("<i8", (4,), bytes(32))
    inputs = npy("<f4", (4, 2), bytes(32))
    good = {"inputs.npy": inputs, "targets.npy": labels}
    return {
        "pickled inputs": _npz_of(canary, "inputs", "targets"),
        "pickled classes": _zip(**good, **{"classes.npy": npy("|O", (1,), pickle.dumps([Canary(canary)]))}),
        "a pickle as a member": _zip(**good, **{"classes.npy": pickle.dumps(Canary(canary))}),
        "a shape of 2^60": _zip(**{**good, "inputs.npy": npy("<f8", (1 << 60,), b"x")}),
        "a shape of 2^33 rows": _zip(**{**good, "inputs.npy": npy("|u1", (1 << 33,), b"x")}),
        "a negative shape": _zip(**{**good, "inputs.npy": npy("<f8", (-1, 2), bytes(16))}),
        "text of 4 GB": _zip(**{**good, "classes.npy": npy("<U1000000000", (1,), b"x")}),
        "a header of brackets": _zip(**{**good, "inputs.npy": npy("<f8", (1,)).replace(b"(1,)", b"(" * 5000)}),
        "a header of code": _zip(**{**good, "inputs.npy": npy("<f8", (1,)).replace(b"(1,)", b"exit")}),
        "3 GB of zeros": zeros_zip("inputs.npy", npy("<f4", (BOMB << 18, 1)), BOMB),
        "a label of 2^62": _zip(**{**good, "targets.npy": npy("<i8", (4,), struct.pack("<4q", 0, 1, 2, 1 << 62))}),
        "a label of 2^63": _zip(**{**good, "targets.npy": npy("<u8", (4,), struct.pack("<4Q", 0, 1, 2, 1 << 63))}),
        "path traversal": _zip(**good, **{"../../../tmp/evil.npy": labels}),
        "markup in classes": _zip(**good, **{"classes.npy": npy("<U60", (1,), EVIL.ljust(60)[:60].encode("utf-32le"))}),
        "no examples": _zip(**{"inputs.npy": npy("<f4", (0, 2)), "targets.npy": npy("<i8", (0,))}),
        "no columns": _zip(**{**good, "inputs.npy": npy("<f4", (4, 0))}),
        "images without pixels": _zip(**{**good, "inputs.npy": npy("|u1", (4, 0, 8, 8))}),
    }  # fmt: skip

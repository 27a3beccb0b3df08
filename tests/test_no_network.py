"""Nothing asks another machine for anything, unless asked to: every module and the main verbs, without sockets."""

import subprocess
import sys
from pathlib import Path

import slimbayes

# In a process of its own: modules are imported once, and others have imported them here already.
PROGRAM = """
import importlib, os, pkgutil, socket, sys, tempfile, warnings
from pathlib import Path

asked = []

class Refused(OSError):
    pass

def refuse(*arguments, **options):
    # What the machine's own processes talk through is not the network.
    if arguments and arguments[0] == socket.AF_UNIX:
        return real(*arguments, **options)
    asked.append("".join(__import__("traceback").format_stack()[-6:-1]))
    raise Refused("a socket was asked for")

real = socket.socket
class Socket(socket.socket):
    def __new__(cls, *arguments, **options):
        return refuse(*arguments, **options)
for name in ("create_connection", "getaddrinfo", "gethostbyname", "create_server", "socketpair"):
    setattr(socket, name, refuse)
socket.socket = Socket

if sys.argv[1] == "--try":
    try:
        socket.create_connection(("192.0.2.1", 80))
    except OSError:
        pass
    sys.exit(len(asked))

import torch
from torch import nn
import slimbayes as sb

skipped = []
for found in pkgutil.walk_packages(sb.__path__, "slimbayes."):
    if found.name.endswith(("__main__", "native._kernels")):  # the second is C, and no module
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as error:  # an extra that is not installed
        skipped.append(f"{found.name}: {error}")
print("skipped", skipped)

x, y = torch.randn(16, 3), torch.randint(2, (16,))
model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), sb.Rank1(components=2))
sb.summary(model)
folder = Path(tempfile.mkdtemp())
sb.save(model, folder / "net.safetensors")
sb.load(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), folder / "net.safetensors")
sb.predict(model, x, samples=2)
sb.kl(model)
from slimbayes.data import load
load("digits")
from slimbayes.cli import main
train = f"train --data digits --network dense(hidden=[4]) --epochs 1 --out {folder / 'run'}"
for words in (["info"], ["compare", "--help"], ["--help"], train.split()):
    try:
        sys.argv = ["slimbayes", *words]
        main()
    except SystemExit as error:
        assert not error.code, (words, error.code)
assert (folder / "run" / "run.json").exists()
from slimbayes.verbs.provenance import provenance
provenance()
print("\\n".join(asked))
sys.exit(len(asked))
"""


def run(*words):
    source = str(Path(slimbayes.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *words],
        capture_output=True, text=True, env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
                                             "HOME": "/nonexistent"},
    )  # fmt: skip
    return done


def test_modules_and_verbs_open_no_socket():
    done = run("all")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_guard_sees_a_socket():
    assert run("--try").returncode == 1

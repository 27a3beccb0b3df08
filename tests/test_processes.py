"""Processes that work for this one: what they give, and that none outlives a caller that was killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from slimbayes.lab.processes import workers

CALLER = """
import os, sys, time
from slimbayes.lab.processes import workers

def ready(text):
    assert text == "ready"

def wait():
    print(os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    with workers(2, ready, ("ready",)) as pool:
        for task in [pool.submit(wait) for _ in range(2)]:
            task.result()
"""


def _alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_they_work_and_are_made_ready():
    with workers(1, os.putenv, ("SLIMBAYES_READY", "1")) as pool:
        assert pool.submit(pow, 2, 5).result() == 32


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for processes in /proc")
def test_none_outlives_a_caller_that_was_killed(tmp_path):
    script = tmp_path / "caller.py"
    script.write_text(CALLER)
    caller = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    processes = [int(caller.stdout.readline()) for _ in range(2)]
    assert all(map(_alive, processes))
    caller.send_signal(signal.SIGKILL)
    caller.wait()
    end = time.monotonic() + 20
    while any(map(_alive, processes)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_alive, processes))

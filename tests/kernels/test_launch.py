"""Where kernels run, and that nothing of Triton's is imported before one does."""

from __future__ import annotations

import subprocess
import sys

import torch

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import available


def test_programs_are_imported_late():
    code = (
        "import sys, slimbayes\nfrom slimbayes.accelerate.gpu import rows, factors, weights\n"
        "sys.exit('slimbayes.accelerate.gpu.programs' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_switch_turns_them_off():
    with fast_paths(triton=False):
        assert not available(torch.device("cuda")) and not available(torch.device("cpu"))
    assert not available(torch.device("meta"))

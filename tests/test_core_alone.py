"""The core is whole without the fast paths: its suite passes where ``slimbayes.accelerate`` cannot be imported.

What is marked "accelerate" is left out; the end of the run's report says how many tests that is.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SUITE = [
    "tests/test_convert.py",
    "tests/test_draws.py",
    "tests/test_keyed.py",
    "tests/test_kl.py",
    "tests/test_likelihoods.py",
    "tests/test_posteriors.py",
    "tests/test_predictive.py",
    "tests/test_snapshots.py",
    "tests/defects/test_facts_of_a_draw.py",
    "tests/defects/test_layer_never_called.py",
    "tests/defects/test_recomputed_layers.py",
    "tests/defects/test_rows_that_mix.py",
    "tests/layers/test_attention.py",
    "tests/layers/test_recurrent.py",
    "tests/test_matrix.py::test_identity_without_spread",
    "tests/test_matrix.py::test_every_parameter_gets_a_gradient",
]
FEWEST = 1800  # tests that pass: a suite that collects nothing would pass too


@pytest.mark.uncounted
@pytest.mark.slow
def test_the_cores_suite_passes_without_fast_paths():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--without-accelerate", "-q", "-x", "-p", "no:cacheprovider", "-p",
         "no:xdist", "--tb=short", "--show-capture=no", *SUITE],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = run.stdout[-6000:]
    print(end.splitlines()[-1])
    assert run.returncode == 0, end
    found = re.search(r"(\d+) passed.* (\d+) deselected", end)
    assert found is not None and int(found[1]) >= FEWEST and int(found[2]) < 30, end


def test_verbs_of_core_alone(tmp_path):
    script = (
        "import conftest, sys; sys.meta_path.insert(0, conftest.Hidden())\n"
        "import slimbayes, torch; from torch import nn\n"
        "model = slimbayes.bayesianize(nn.Linear(2, 2), slimbayes.Rank1()); x = torch.randn(3, 2)\n"
        "slimbayes.elbo(slimbayes.draw(model, x), torch.zeros(3).long(), model, num_data=3).loss.backward()\n"
        "slimbayes.predict(model, x, samples=2), slimbayes.evaluate(model, [(x, torch.zeros(3).long())])\n"
        "slimbayes.save(model, sys.argv[1]), slimbayes.load(nn.Linear(2, 2), sys.argv[1]), slimbayes.summary(model)\n"
        "assert not any(name.startswith('slimbayes.accelerate') for name in sys.modules)\n"
        "import slimbayes.accelerate.switches"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
    )
    assert run.returncode == 1 and run.stderr.rstrip().endswith("it is hidden"), run.stderr

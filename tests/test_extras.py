"""A missing optional package: an error (or a way without it) that names the extra to install; and the wheel itself."""

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slimbayes as sb
from slimbayes.lab.cli.info import EXTRAS
from slimbayes.training.monitor import Progress

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "slimbayes"
LISTED = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n\n")[0]
OPTIONAL = {  # lists of strings are written in TOML as in Python
    name: ast.literal_eval(entries)
    for name, entries in re.findall(r"^(\w+) = (\[.*?\])$", LISTED, re.M | re.S)
}


@pytest.fixture
def without(monkeypatch):
    """Make a package as if it were not installed."""

    def block(package):
        if package == "accelerate" and importlib.util.find_spec("transformers"):
            # transformers remembers for good whether it was there when it was first asked.
            importlib.import_module("slimbayes.integrations.transformers")
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, package, None)

    return block


def again(name):
    """Import a module of ours anew, with everything below it, and leave the ones that were there in place."""

    def action(tmp_path):
        known = {
            key: sys.modules.pop(key) for key in [*sys.modules] if key == name or key.startswith(f"{name}.")
        }
        try:
            importlib.import_module(name)
        finally:
            for key in [key for key in sys.modules if key == name or key.startswith(f"{name}.")]:
                del sys.modules[key]
            sys.modules.update(known)

    return action


def command(*words):
    """A command as the shell runs it, with the program imported anew; its words on the screen are the error."""

    def action(tmp_path):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["slimbayes", *words])
            for name in [name for name in sys.modules if name.startswith("slimbayes.lab.cli.")]:
                patch.delitem(sys.modules, name)
            with pytest.raises(SystemExit) as stopped:
                sb_cli.main()
        raise ImportError(str(stopped.value.code))

    return action


sb_cli = importlib.import_module("slimbayes.lab.cli")


def rendered(tmp_path):
    from slimbayes.lab.report.panels import Panel, Plot, render

    render(Plot("a", "b", "c", [Panel(lambda figure: None, "d")], [], []))


def trained(tmp_path):
    model = sb.bayesianize(torch.nn.Linear(2, 2), sb.Rank1())
    sb.fit(model, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)), epochs=1)


def parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    sb.data.load(str(tmp_path / "a.parquet"), target="y")


def picture(tmp_path):
    from slimbayes.lab.data.inputs import read_image

    read_image(tmp_path / "a.png")


def configuration(tmp_path):
    from slimbayes.lab.config import RunConfig, read_config

    (tmp_path / "a.yaml").write_text("data: wine")
    read_config(RunConfig, tmp_path / "a.yaml")


def shell_options(tmp_path):
    from slimbayes.lab.cli.options import pairs

    pairs(["a=1"], "--set")


def bench_plot(tmp_path):
    from slimbayes.lab.bench.plot import write_plot

    write_plot(None, tmp_path / "plot")


def summary_table(tmp_path):
    from slimbayes.lab.report.tables import print_summary

    print_summary({})


def heat_map(tmp_path):
    sb.analysis.plot_stddevs(sb.bayesianize(torch.nn.Linear(2, 2), sb.MeanField()))


def frozen():
    return sb.freeze(sb.bayesianize(torch.nn.Linear(2, 2), sb.Rank1()), draws=4)


def onnx_written(tmp_path):
    sb.export.to_onnx(frozen(), torch.zeros(3, 2), tmp_path / "a.onnx")


def onnx_read(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"")
    sb.export.OnnxModel(tmp_path / "a.onnx")


def eight_bits(tmp_path):
    sb.export.quantize(frozen())


# (the package that is missing, the extra that the error names, what needs it)
CASES = [
    ("lightning", "train", trained),
    ("lightning", "lightning", again("slimbayes.integrations.lightning")),
    ("transformers", "transformers", again("slimbayes.integrations.transformers")),
    ("accelerate", "transformers", again("slimbayes.integrations.transformers")),
    ("huggingface_hub", "hub", again("slimbayes.integrations.hub")),
    ("torchmetrics", "metrics", lambda tmp_path: sb.metrics.auroc([0.1, 0.9], [0, 1])),
    ("rich", "cli", summary_table),
    ("rich", "cli", command("info")),
    ("typer", "cli", command("info")),
    ("yaml", "cli", configuration),
    ("yaml", "cli", shell_options),
    ("matplotlib", "plots", rendered),
    ("matplotlib", "plots", bench_plot),
    ("matplotlib", "plots", heat_map),
    ("onnx", "export", onnx_written),
    ("onnxscript", "export", onnx_written),
    ("onnxruntime", "export", onnx_written),
    ("onnxruntime", "export", onnx_read),
    ("torchao", "int8", eight_bits),
    ("sklearn", "sklearn", again("slimbayes.sklearn")),
    ("sklearn", "data", lambda tmp_path: sb.data.load("wine")),
    ("pyarrow", "data", parquet),
    ("PIL", "data", picture),
]
DOES_WITHOUT = {"tensorboard"}  # their absence is no error


@pytest.mark.parametrize(
    ("package", "extra", "action"),
    CASES,
    ids=[f"{package}-{getattr(action, '__name__', 'action')}" for package, _, action in CASES],
)
def test_a_missing_package_names_its_extra(without, tmp_path, package, extra, action):
    assert importlib.util.find_spec(package) is not None  # or it would be missing anyway
    without(package)
    with pytest.raises((ImportError, ValueError)) as error:
        action(tmp_path)
    assert re.search(rf"pip install (-U )?'slimbayes\[{extra}\]'", str(error.value))
    assert extra in OPTIONAL


def test_every_optional_import_has_a_case():
    """What the sources import beside the core, in whatever way."""
    core = {"torch", "numpy", "safetensors", "slimbayes", "triton", *sys.stdlib_module_names}
    core |= {
        "bayesian_torch",
        "torchbnn",
        "blitz",
        "torch_uncertainty",
        "ivon",
        "laplace",
    }  # peers, in an environment of their own
    found = {}
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        names = set(re.findall(r"""(?<!\w)(?:need|import_module)\(\s*["']([\w.]+)["']""", text))
        if set(re.findall(r"^\s*(?:import|from) +(\w+)", text, re.M)) - core:  # words of a docstring, perhaps
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names.update(alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add(node.module)
        found.update({name.split(".")[0]: path.name for name in names})
    assert {"PIL", "yaml", "lightning"} <= found.keys()
    untested = found.keys() - core - {package for package, _, _ in CASES} - DOES_WITHOUT
    assert not untested, f"no case for {[(name, found[name]) for name in untested]}"


def test_the_two_area_metrics_are_left_out_with_a_word_on_the_extra(without, monkeypatch):
    monkeypatch.setattr("slimbayes.metrics.evaluation._warned", set())
    without("torchmetrics")
    model = sb.bayesianize(torch.nn.Linear(2, 2), sb.Rank1())
    with pytest.warns(UserWarning, match=r"slimbayes\[metrics\]"):
        found = sb.evaluate(model, [(torch.randn(6, 2), torch.arange(6) % 2)])
    assert "auroc" not in found and "nll" in found


def test_progress_does_without_rich(without, monkeypatch, capsys):
    without("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(10, 0, "label", quiet_seconds=0.0).live() as progress:
        progress.show(5, "loss 1.0", 100.0)
    assert "step 5/10" in capsys.readouterr().err


def test_info_knows_every_extra():
    modules = {"pillow": "PIL", "scikit-learn": "sklearn", "PyYAML": "yaml"}
    for extra, shown in EXTRAS.items():
        wanted = [re.match(r"[\w-]+", entry)[0] for entry in OPTIONAL[extra]]
        mine = {modules.get(name, name) for name in wanted if name != "slimbayes"}
        assert set(shown) <= {"torchmetrics", "typer", "yaml"} | mine
        assert extra == "cli" or mine <= set(shown)
    assert set(EXTRAS) == set(OPTIONAL) - {"all", "dev", "docs"}


@pytest.mark.uncounted
def test_the_wheel_works_beside_the_core_alone():
    """Built without a compiler, unpacked, and imported where there is nothing but torch, numpy and safetensors."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "wheel.py", "--quick"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0 and done.stdout.count(" ok\n") == 3, done.stdout + done.stderr

"""Build the sdist and the wheel, install them in clean environments, and see that every extra's feature works.

    python tools/wheel.py                     # the core alone, and the package without a compiler
    python tools/wheel.py metrics hub         # those extras, each in an environment of its own
    python tools/wheel.py --every             # the core and all extras: minutes each
    python tools/wheel.py --quick             # seconds: no environment, but the unpacked wheel beside the core alone

Needs ``build`` (pip install build), but for --quick. To add an extra, add a line to FEATURES.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CORE = """
import tempfile, torch, slimbayes as sb
net = lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
model, x, y = sb.bayesianize(net(), sb.Rank1()), torch.randn(20, 4), torch.randint(3, (20,))
sb.elbo(sb.draw(model, x), y, model, num_data=20).loss.backward()
sb.save(model, tempfile.gettempdir() + "/slimbayes-wheel.safetensors")
again = sb.load(net(), tempfile.gettempdir() + "/slimbayes-wheel.safetensors")
assert torch.equal(sb.predict(again, x, seed=0).mean, sb.predict(model, x, seed=0).mean)
assert sb.evaluate(model, [(x, y)])["examples"] == 20
from slimbayes.accelerate import cpu
print(cpu.state())
"""
RUN = """
folder = tempfile.mkdtemp()
sb.fit(model, (x, y), epochs=1, batch_size=5, folder=folder, progress=False)
"""
LIGHTNING = """
import lightning.pytorch as pl
from slimbayes.integrations.lightning import BayesianModule, KLAnnealing
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
trainer = pl.Trainer(fast_dev_run=True, callbacks=[KLAnnealing(0.5)], accelerator="cpu")
trainer.fit(BayesianModule(model), loader, loader)
assert "val_ece" in trainer.callback_metrics
"""
TRANSFORMERS = """
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from slimbayes.integrations.transformers import BayesianTrainer
config = BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
rows = [{"input_ids": [i, 1, 2], "labels": i % 2} for i in range(8)]
options = TrainingArguments(tempfile.mkdtemp(), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
bert = sb.bayesianize(BertForSequenceClassification(config), sb.Rank1())
BayesianTrainer(bert, options, train_dataset=rows).train()
"""
HUB = """
from slimbayes.integrations.hub import from_pretrained, save_pretrained
folder = save_pretrained(model, tempfile.mkdtemp(), repo_id="me/net")
assert torch.equal(sb.predict(from_pretrained(net(), folder), x, seed=0).mean, sb.predict(model, x, seed=0).mean)
"""
PEFT = """
import peft
lora = peft.LoraConfig(r=2, target_modules=["0", "2"])
tuned = sb.bayesianize(peft.get_peft_model(net(), lora), sb.MeanField(), include="lora_")
sb.elbo(sb.draw(tuned, x), y, tuned, num_data=20).loss.backward()
"""
DATA = """
import pyarrow, pyarrow.parquet, PIL.Image
assert sb.data.load("digits").num_outputs == 10
path = tempfile.mkdtemp() + "/table.parquet"
columns = {"a": list(range(100)), "b": [i / 7 for i in range(100)], "target": [i % 2 for i in range(100)]}
pyarrow.parquet.write_table(pyarrow.table(columns), path)
assert sb.data.load(path, target="target").num_outputs == 2
"""
PLOTS = """
from slimbayes.lab.report.panels import Panel, Plot, render
plot = Plot("name", "title", "text", [Panel(lambda figure: figure.subplots().plot([1, 2]), "a line")], [], [])
render(plot)
assert plot.panels[0].svg.lstrip().startswith("<?xml")
"""
CLI = """
import pathlib, subprocess, sys
program = str(pathlib.Path(sys.executable).with_name("slimbayes"))
folder = tempfile.mkdtemp()
for words in ("--version", "info", f"train --data wine --epochs 2 --out {folder}/run", f"evaluate {folder}/run",
              f"compare --data wine --epochs 1 -m Deterministic() -m Rank1(components=2) --out {folder}/compare"):
    subprocess.run([program, *words.split()], check=True, stdout=subprocess.DEVNULL, cwd=folder)
"""
SKLEARN = """
from slimbayes.sklearn import BayesianMLPClassifier
from sklearn.datasets import load_iris
flowers, kinds = load_iris(return_X_y=True)
assert BayesianMLPClassifier().fit(flowers, kinds).predict_proba(flowers).shape == (150, 3)
"""
EXPORT = """
frozen = sb.freeze(model, draws=8, seed=0, example=x)
served = sb.export.OnnxModel(sb.export.to_onnx(frozen, x, tempfile.mkdtemp() + "/model.onnx"))
assert torch.allclose(served(x[:7]), frozen(x[:7]), atol=1e-5)
"""
INT8 = """
frozen = sb.freeze(model, draws=8, seed=0, example=x)
assert 0 < (sb.export.quantize(frozen)(x) - frozen(x)).abs().max() < 0.1
"""
TENSORBOARD = (
    """
import pathlib
"""
    + RUN
    + """
assert list(pathlib.Path(folder).rglob("*tfevents*"))
"""
)
# What of an extra must work where it alone is installed; "+" joins extras that only do their work together.
FEATURES = {
    "metrics": "assert sb.metrics.auroc([0.1, 0.9], [0, 1]) == 1.0",
    "data": DATA,
    "train": RUN,
    "plots": PLOTS,
    "cli": CLI,
    "sklearn": SKLEARN,
    "lightning": LIGHTNING,
    "tensorboard+train": TENSORBOARD,
    "hub": HUB,
    "transformers": TRANSFORMERS,
    "peft": PEFT,
    "export": EXPORT,
    "int8": INT8,
    "all": DATA + PLOTS + CLI + SKLEARN + LIGHTNING + HUB + TRANSFORMERS + PEFT + EXPORT + INT8,
}  # fmt: skip
NOT_FEATURES = {"dev", "docs"}  # extras for those who work on slimbayes itself


def main(words: list[str] | None = None) -> int:
    """Run the checks and print a line for each; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("extras", nargs="*", help=f"among {', '.join(FEATURES)}")
    parser.add_argument("--every", action="store_true", help="every extra")
    parser.add_argument("--quick", action="store_true", help="no environments and no network")
    options = parser.parse_args(words)
    unknown = set(options.extras) - set(FEATURES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; add it to FEATURES in {Path(__file__).name}")
    problems = undescribed()
    with tempfile.TemporaryDirectory(prefix="slimbayes-wheel-") as place:
        checks = quick(Path(place)) if options.quick else full(Path(place), options.extras, options.every)
        for name, seconds, outcome in checks:
            print(f"{name:28} {seconds:6.1f} s  {'ok' if outcome is None else 'FAILED'}", flush=True)
            if outcome is not None:
                print(textwrap.indent(outcome, "    "), flush=True)
                problems.append(name)
    print(f"failed: {', '.join(problems)}" if problems else "all well")
    return bool(problems)


def undescribed() -> list[str]:
    """Extras of pyproject.toml that no feature is tried of, and features of none."""
    text = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", text, re.M)) - NOT_FEATURES
    tried = {name.partition("+")[0] for name in FEATURES}
    return [
        f"extra {name!r}: in pyproject.toml or in FEATURES, not in both" for name in sorted(extras ^ tried)
    ]


Check = tuple[str, float, str | None]


def step(name: str, action, *args) -> Check:
    """(name, seconds, what went wrong or None)."""
    start = time.monotonic()
    try:
        outcome = action(*args)
    except subprocess.CalledProcessError as error:
        outcome = "\n".join(f"{error.stdout or ''}{error.stderr or ''}".splitlines()[-25:]) or str(error)
    return name, time.monotonic() - start, outcome


def run(*words: str | Path, **options) -> str:
    """What a command prints; an error holds what it said."""
    done = subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, **options
    )
    return done.stdout


def sources(place: Path) -> Path:
    """A copy of what a build needs, so that no build folder is left in the checkout or taken from it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / name)
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", place / "src", ignore=ignored)
    return place


def contents(wheel: Path, compiled: bool = True) -> str | None:
    """What the wheel lacks, or has too much, against the sources."""
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "slimbayes").rglob("*")
        if path.is_file() and path.suffix not in (".so", ".pyc")
    }
    built = {
        name
        for name in names
        if name.startswith("slimbayes/accelerate/cpu/_kernels") and name.endswith((".so", ".pyd"))
    }
    strange = {name for name in names - expected - built if ".dist-info/" not in name}
    lacking = sorted(expected - names)
    if compiled and not built:
        lacking.append("slimbayes/accelerate/cpu/_kernels: the compiled kernels")
    return (
        "\n".join([f"lacks {name}" for name in lacking] + [f"has {name}" for name in sorted(strange)]) or None
    )


def quick(place: Path) -> Iterator[Check]:
    """The wheel by pip alone, without a compiler, and the core's smoke test where there is nothing but the core."""
    folder = sources(place)
    build = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", place, folder)
    yield step("wheel without a compiler", lambda: run(*build, env=without_compiler()) and None)
    wheel = next(place.glob("*.whl"))
    yield step(f"contents ({wheel.stat().st_size // 1024} KiB)", contents, wheel, False)
    zipfile.ZipFile(wheel).extractall(place / "unpacked")
    yield step("core, and nothing else", isolated, place, CORE + "assert 'not compiled' in cpu.state()")


def isolated(place: Path, code: str) -> str | None:
    """Run code that sees the unpacked wheel, its dependencies and theirs, and no other package."""
    seen = place / "core"
    seen.mkdir()
    for path in core_files():
        (seen / path.name).symlink_to(path)
    # -S: without the environment's own packages
    start = f"import sys\nsys.path += [{str(place / 'unpacked')!r}, {str(seen)!r}]\n"
    run(sys.executable, "-I", "-S", "-c", start + code, cwd=place)
    return None


def core_files() -> set[Path]:
    """Files and folders of the distributions that the core needs, and of those that they need."""
    text = (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1].split("]")[0]
    waiting, known, found = re.findall(r'"([\w.-]+)', text), set(), set()
    while waiting:
        name = waiting.pop()
        if name in known:
            continue
        known.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for file in distribution.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                found.add(Path(str(distribution.locate_file(file.parts[0]))))
        for line in distribution.requires or ():
            if "extra ==" not in line:
                waiting.append(re.match(r"[\w.-]+", line)[0])
    return found


def without_compiler() -> dict[str, str]:
    """The environment of a user who has no compiler, and no slimbayes beside the installed one."""
    environment = {**os.environ, "CC": "no-such-compiler"}
    environment.pop("PYTHONPATH", None)
    return environment


def full(place: Path, extras: list[str], every: bool) -> Iterator[Check]:
    """Both archives as ``python -m build`` makes them, and an environment for the core and for each extra."""
    folder = sources(place)
    yield step(
        "python -m build", lambda: run(sys.executable, "-m", "build", "--outdir", place, folder) and None
    )
    wheel = next(place.glob("*.whl"))
    yield step(f"contents ({wheel.stat().st_size // 1024} KiB)", contents, wheel)
    if every or not extras:
        yield step("core", fresh, place, wheel, "", CORE + "assert 'not compiled' not in cpu.state()")
        sdist = next(place.glob("*.tar.gz"))
        yield step(
            "sdist without a compiler",
            fresh,
            place,
            sdist,
            "",
            CORE + "assert 'not compiled' in cpu.state()",
        )
    for extra in FEATURES if every else extras:
        yield step(f"[{extra}]", fresh, place, wheel, extra.replace("+", ","), CORE + FEATURES[extra])


def fresh(place: Path, archive: Path, extras: str, code: str) -> str | None:
    """Install an archive with extras in a new environment and run the code there."""
    home = place / "environment"
    try:
        run(sys.executable, "-m", "venv", home)
        python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
        environment = without_compiler()  # a wheel needs none
        what = f"{archive}[{extras}]" if extras else str(archive)
        pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-compile")
        run(*pip, "-c", ROOT / "constraints.txt", what, env=environment)
        run(python, "-I", "-W", "ignore", "-c", code, cwd=place, env=environment)
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return None


if __name__ == "__main__":
    sys.exit(main())

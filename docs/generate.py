"""Write the generated pages of the documentation; ``--check`` only says whether they are current."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

import slimbayes as sb
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.linear import TransposedLinear
from slimbayes.core.layers.table import UNSUPPORTED, WEIGHTED, layer_classes
from slimbayes.core.methods import METHODS, Method
from slimbayes.lab.bench.page import page_text
from slimbayes.lab.bench.results import Results, read_results
from slimbayes.lab.bench.settings import PEERS as BENCHED
from slimbayes.lab.bench.table import ratio
from slimbayes.lab.bench.table import title as called
from slimbayes.lab.experiments import catalogue
from slimbayes.lab.experiments.pages import stale_pages, write_pages
from slimbayes.lab.suite.page import details, estimators, intervals, study, summary, worse
from slimbayes.lab.suite.running import read_rows

DOCS = Path(__file__).parent
ROOT = DOCS.parent
ESTIMATORS = ("shared", "flipout", "local")
TITLE = "# Which method converts which layer"
NOTE = "<!-- Written by docs/generate.py: run `python docs/generate.py` after a change, do not edit. -->"
INTRO = """\
`sb.bayesianize(model, method)` converts every layer for which the table says ✓. A number means that the pair
is refused with a `TypeError` that names the method and the layer type; the reason stands below the table.
Layers marked * are converted by default (EMP and ECMP have a `patch` of their own instead); the others when
`include` or a rule selects them."""
MODULES = """\
`DeepEnsemble` copies whole modules and `Deterministic` changes nothing, so both take modules of any type. The
other methods recognise layers by their exact type; a subclass is left alone. Classes derived from torch's recurrent
and attention layers
({kinds})
have no converted class: by default they are left alone with a warning, and selecting one is an error."""
LIMITS = """\
## Limits within a supported pair

- `estimator="local"` is exact for a `Linear` layer on one vector per example; for convolutions, sequences and
  attention, where a weight is used at several positions, it samples those outputs independently.
- `BatchNorm` statistics are computed over all rows of a draw, so components and samples share them. Only the
  members of a `DeepEnsemble` have their own, and the components of `EMP(own_statistics=True)`.
- In draws `EmbeddingBag` needs a 2-D input `[batch, bag size]`: offsets into a flat one cannot be tiled.
- The `padding_idx` row of an `Embedding` is never random.
- An `Embedding` or `EmbeddingBag` with `max_norm` cannot have a random table, and a norm without affine
  parameters has nothing to make random; both are errors.
- `DeepEnsemble` re-initialises its members by the modules' own `reset_parameters`; a module without one needs
  `reinitialize=False` or a function of yours."""


def methods() -> dict[str, Method]:
    """Every method, by the name of its column; those with estimators once for each."""
    columns: dict[str, Method] = {}
    for name, kind in METHODS.items():
        if kind in (sb.MeanField, sb.KTied):
            columns.update({f"{name} {e}": kind(estimator=e) for e in ESTIMATORS})  # type: ignore[call-arg]
        else:
            columns[name] = kind()
    return columns


def layers() -> dict[str, type[Converted]]:
    """Every layer type, by its title; transformers' Conv1D after Linear, whose transpose it is."""
    rows: dict[str, type[Converted]] = {}
    for layer in layer_classes().values():
        rows[layer.title] = layer
        if layer.title == "Linear":
            rows[TransposedLinear.title] = TransposedLinear
    return rows


def support() -> str:
    """The page docs/support.md."""
    columns, rows = methods(), layers()
    weighted = {TransposedLinear, *layer_classes(WEIGHTED).values()}
    reasons: dict[str, tuple[int, list[str]]] = {}  # reason -> its number and the refused layers
    lines = [
        "| layer | " + " | ".join(columns) + " |",
        "|---|" + ":-:|" * len(columns),
    ]
    for title, layer in rows.items():
        cells = [f"`{title}`" + (" *" if layer in weighted else "")]
        for method in columns.values():
            reason = method.refuses(layer)
            if reason is None:
                cells.append("✓")
                continue
            number, refused = reasons.setdefault(reason, (len(reasons) + 1, []))
            refused.append(f"`{title}`")
            cells.append(str(number))
        lines.append("| " + " | ".join(cells) + " |")
    kinds = ", ".join(f"`{kind.__name__}`" for kind in UNSUPPORTED)
    why = [f"{number}. {reason}: {', '.join(refused)}." for reason, (number, refused) in reasons.items()]
    return "\n\n".join(
        (
            TITLE,
            NOTE,
            INTRO,
            "\n".join(lines),
            "## Why a pair is refused\n\n" + "\n".join(why),
            MODULES.format(kinds=kinds),
            LIMITS + "\n",
        )
    )


def speed() -> str:
    """The page docs/speed.md, from the figures in bench/results."""
    return page_text(DOCS.parent / "bench" / "results", DOCS)


# Columns of the costs: the device, then network, phase and mode of the cell.
COSTS = {
    "training, WRN-28-10, GPU": ("gpu", "wrn-28-10", "train", "graphs"),
    "training, MLP of 4,096, GPU": ("gpu", "mlp-4096", "train", "graphs"),
    "training, WRN-16-2, CPU": ("cpu", "wrn-16-2", "train", "eager"),
    "training, LSTM, CPU": ("cpu", "lstm", "train", "eager"),
    "a draw, LSTM, CPU": ("cpu", "lstm", "predict", "eager"),
}
# Rows: the call, as it was measured, and the name that the bench gives it.
CONTENDERS = {
    "Rank1(components=4)": "rank1",
    "BatchEnsemble(components=4)": "batchensemble",
    "KTied(rank=2)": "ktied-shared",
    "MeanField()": "meanfield-shared",
    'MeanField(estimator="flipout")': "meanfield-flipout",
    "EMP(components=5)": "emp",
    "ECMP(components=5)": "ecmp",
    "MCDropout(rate=0.1)": "mcdropout",
    "DropConnect(rate=0.1)": "dropconnect",
    "DeepEnsemble(members=4)": "deepensemble",
    "Deterministic()": "deterministic",
}
# What was gained: the result, its table, and which of its rows is which method.
GAINS = {
    "CIFAR-10, WRN-16-2, held-out images": ("rank1/tuning.gpu", "cifar10-tuning", {
        "Deterministic, l2 = 0.0005": "plain",
        "BatchEnsemble, l2 = 0.0005": "BatchEnsemble",
        "Rank-1 Gaussian, l2 = 0.0005, KL averaged, p = 0.01": "Rank1, Normal",
        "Rank-1 Cauchy, l2 = 0.0005, p = 1e-10": "Rank1, Cauchy",
    }),
    "CIFAR-100, WRN-28-4": ("emp/table6.gpu", "cifar100", {
        "Vanilla": "plain", "Dropout": "MCDropout", "EMP": "EMP", "ECMP": "ECMP",
    }),
    "PhysioNet 2012, LSTM, test set": ("rank1/table4.desk", "test", {
        "Deterministic": "plain", "BatchEnsemble": "BatchEnsemble", "Rank-1 Gaussian": "Rank1, Normal",
        "Rank-1 Cauchy": "Rank1, Cauchy", "Fully Bayesian": "MeanField", "Ensemble": "DeepEnsemble",
    }),
    "MNIST, MLP 784-400-400-10": ("ktied/table2.gpu", "mnist", {
        "Mean-field": "MeanField", "1-tied": "KTied, rank 1", "2-tied": "KTied, rank 2", "3-tied": "KTied, rank 3",
    }),
}  # fmt: skip


def table(head: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> str:
    """A table whose first columns are words and whose others are numbers."""
    names = list(head)
    rule = "|" + "|".join(["---"] * left + ["---:"] * (len(names) - left)) + "|"
    return "\n".join(
        ["| " + " | ".join(names) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)]
    )


def bench() -> dict[str, Results]:
    """What was measured on each device."""
    return {name: read_results(ROOT / "bench" / "results" / f"bench-{name}.json") for name in ("cpu", "gpu")}


def stored(name: str, part: str) -> dict[str, dict[str, list[float]]]:
    """A table of a result: values over seeds by row and column."""
    document = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    found = next(one for one in document["tables"] if one["name"] == part)
    return {row["label"]: row["values"] for row in found["rows"]}


def spread(values: list[float] | None, digits: int) -> str:
    """Mean ± standard error over seeds; the value alone where there is one seed."""
    if not values:
        return "–"
    error = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


def costs() -> str:
    """What every method costs, in parameters of a WRN-28-10 and in time."""
    found = bench()

    def row(call: str, name: str) -> list[str]:
        with torch.device("meta"):  # counted, not allocated
            model = sb.bayesianize(sb.models.wrn28_10(10), eval(f"sb.{call}"))
        cells = [found[device].find("own", *place, name) for device, *place in COSTS.values()]
        extra = f"{100 * sb.summary(model).overhead:+.2f} %"
        return [f"`{call}`", extra, *("–" if cell is None else ratio(cell) for cell in cells)]

    rows = [row(call, name) for call, name in CONTENDERS.items()]
    return table(["method", "parameters, WRN-28-10", *COSTS], rows)


def gains() -> str:
    """What was measured of the methods' predictions."""
    lines = []
    for data, (name, part, rows) in GAINS.items():
        values = stored(name, part)
        seeds = max(len(value) for row in rows for value in values[row].values())
        paper, item = name.split(".")[0].split("/")
        for k, (label, method) in enumerate(rows.items()):
            found: dict[str, Any] = values[label]
            ece = found.get("ece") or [value / 100 for value in found.get("ece_percent", [])]
            what = f"[{data}](results/{paper}.md#{item}), {seeds} seed{'s' * (seeds > 1)}" if k == 0 else ""
            numbers = [spread(found.get("nll"), 3), spread(found.get("accuracy"), 1), spread(ece, 4)]
            lines.append([what, method, *numbers])
    return table(["data", "method", "NLL", "accuracy, %", "ECE"], lines, left=2)


def by_draws() -> str:
    """The calibration error by the number of draws."""
    values = stored("emp/figure6.gpu", "cifar100")
    columns = ["1", "20", "100", "200"]
    words = {"Vanilla": "plain", "Dropout": "MCDropout"}
    rows = [
        [words.get(name, name), *(spread(row.get(c), 2) for c in columns)] for name, row in values.items()
    ]
    return table(["method", *columns], rows)


def beside() -> str:
    """The peers and their counterparts, in one run."""
    results = bench()["cpu"]
    lines = []
    for network in ("mlp", "lenet"):
        for name, peer in BENCHED.items():
            cells = [
                (
                    results.find("peers", network, phase, "eager", name),
                    results.find("peers", network, phase, "eager", peer.counterpart),
                )
                for phase in ("train", "predict")
            ]
            if all(cell is not None for pair in cells for cell in pair):
                figures = [ratio(cell) for pair in cells for cell in pair]
                lines.append([network, called(name), called(peer.counterpart), *figures])
    head = ["network", "peer", "slimbayes", "training, peer", "slimbayes", "prediction, peer", "slimbayes"]
    return table(head, lines, left=3)


def filled(name: str, parts: dict[str, str]) -> str:
    """A page written by hand, with what stands between its markers written anew."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for part, content in parts.items():
        marked = re.compile(rf"(<!-- {part}: .*? -->\n).*?(<!-- end of {part} -->)", re.S)
        if not marked.search(text):
            raise ValueError(f"docs/{name} has no markers of {part!r}")
        text = marked.sub(lambda found, content=content: f"{found[1]}\n{content}\n\n{found[2]}", text)
    return text


def choosing() -> str:
    """The page docs/choosing.md with its tables."""
    return filled("choosing.md", {"costs": costs(), "gains": gains(), "draws": by_draws()})


def peers() -> str:
    """The page docs/peers.md with its table."""
    return filled("peers.md", {"peers": beside()})


def reliability() -> str:
    """The page docs/reliability.md with its tables, from the files in reliability/results."""
    sys.path.insert(0, str(ROOT))  # it is no part of the package
    from reliability.figures import figures_text, read_figures

    found = [read_figures(path) for path in sorted((ROOT / "reliability" / "results").glob("*.json"))]
    return filled("reliability.md", {"figures": figures_text(found)})


def defaults() -> str:
    """The page docs/defaults.md with its tables."""
    rows = read_rows(ROOT / "bench" / "results" / "suite.json")
    parts = {
        half: "\n".join([*summary(rows, half), *details(rows, half)]) for half in ("choosing", "judging")
    }
    tried = read_rows(ROOT / "bench" / "results" / "suite-study.json")
    more = {
        "all": summary(rows),
        "worse": worse(rows),
        "intervals": intervals(rows),
        "estimators": estimators(rows),
        "study": study(tried),
        "starts": study(tried, "starts"),
    }
    return filled("defaults.md", {**parts, **{name: "\n".join(lines) for name, lines in more.items()}})


PAGES = {
    "defaults.md": defaults,
    "support.md": support,
    "speed.md": speed,
    "choosing.md": choosing,
    "peers.md": peers,
    "reliability.md": reliability,
}


def results(check: bool) -> int:
    """The pages in docs/results, from the JSON files in results; how many are not as they should be."""
    source, out = DOCS.parent / "results", DOCS / "results"
    if not check:
        for path in write_pages(source, out, catalogue.ENTRIES):
            done = "wrote" if path.exists() else "removed"
            print(f"{done} docs/results/{path.relative_to(out).as_posix()}")
        return 0
    found = stale_pages(source, out, catalogue.ENTRIES)
    for name, what in found.items():
        remedy = "remove it" if what == "foreign" else "run python docs/generate.py"
        print(f"docs/results/{name} is {what}: {remedy}", file=sys.stderr)
    return len(found)


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with ``--check`` return 1 if one of them is stale."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is stale")
    check = parser.parse_args(arguments).check
    stale = 0
    for name, make in PAGES.items():
        path, page = DOCS / name, make()
        if path.is_file() and path.read_text(encoding="utf-8") == page:
            continue
        stale += 1
        if check:
            print(f"docs/{name} is stale: run python docs/generate.py", file=sys.stderr)
        else:
            path.write_text(page, encoding="utf-8")
            print(f"wrote docs/{name}")
    stale += results(check)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())

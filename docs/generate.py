"""Write the generated pages of the documentation; ``--check`` only says whether they are current."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import slimbayes as sb
from slimbayes.bench.page import page_text
from slimbayes.experiments import catalogue
from slimbayes.experiments.pages import stale_pages, write_pages
from slimbayes.layers import TABLE, UNSUPPORTED, WEIGHTED
from slimbayes.layers.base import Converted
from slimbayes.layers.linear import TransposedLinear
from slimbayes.methods import METHODS, Method

DOCS = Path(__file__).parent
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
    for layer in TABLE.values():
        rows[layer.title] = layer
        if layer.title == "Linear":
            rows[TransposedLinear.title] = TransposedLinear
    return rows


def support() -> str:
    """The page docs/support.md."""
    columns, rows = methods(), layers()
    weighted = {TransposedLinear, *WEIGHTED.values()}
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


PAGES = {"support.md": support, "speed.md": speed}


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

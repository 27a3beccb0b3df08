"""Draw the pictures of the documentation beside this file: ``python docs/pictures``.

What they show comes from the library itself (weights that draws see), from results/, and from measured.json: what two
tutorials found. ``--measure`` runs those again and writes that file, and draws the pictures of networks that are
trained for them, which another machine gives slightly differently.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from curves import collapse, cost, error_bars, measure, shift
from drawing import PLACE, ROOT, write
from matplotlib.figure import Figure
from trained import risk_coverage, spectra, stddevs, temperature
from weights import draws, dropped, ensembles, ktied, meanfield, patches, rank1

PICTURES: dict[str, Callable[[], Figure]] = {
    "rank1": rank1,
    "ktied": ktied,
    "patches": patches,
    "meanfield": meanfield,
    "dropped": dropped,
    "ensembles": ensembles,
    "draws": draws,
    "collapse": collapse,
    "cost": cost,
    "shift": shift,
    "error_bars": error_bars,
}
TRAINED = {"temperature": temperature, "risk_coverage": risk_coverage, "spectra": spectra}


def main(arguments: list[str] | None = None) -> int:
    """Draw all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PICTURES, *TRAINED, []], help="all of them by default")
    parser.add_argument(
        "--measure", action="store_true", help="run the tutorials and train the networks first"
    )
    options = parser.parse_args(arguments)
    if options.measure:
        measure()
        stddevs().savefig(
            PLACE / "stddevs.png", dpi=90, metadata={"Software": None}
        )  # too many cells for an SVG
    every = PICTURES | TRAINED
    for name in options.names or (every if options.measure else PICTURES):
        print(write(name, every[name], PLACE).relative_to(ROOT).as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Every experiment by name."""

from __future__ import annotations

import difflib

from slimbayes.lab.experiments import emp, ktied, rank1
from slimbayes.lab.experiments.entry import Experiment

ENTRIES: dict[str, Experiment] = {
    entry.name: entry for entry in (*ktied.ENTRIES, *rank1.ENTRIES, *emp.ENTRIES)
}


def find(name: str) -> Experiment:
    """The experiment of this name.

    >>> find("ktied/table2").item
    'Table 2'
    >>> find("ktied/tabel2")
    Traceback (most recent call last):
        ...
    ValueError: no experiment 'ktied/tabel2'; the closest are ktied/table2, ktied/table5, ktied/table4
    """
    if name in ENTRIES:
        return ENTRIES[name]
    close = difflib.get_close_matches(str(name).lower(), ENTRIES, 3, 0.5)
    hint = f"the closest are {', '.join(close)}" if close else "slimbayes reproduce --list shows them all"
    raise ValueError(f"no experiment {name!r}; {hint}")

"""The measured cells as a table, for the terminal and for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slimbayes.lab.bench.results import Cell, Results, key
from slimbayes.lab.bench.settings import CONTENDERS, MODES, NETWORKS, PEERS, PHASES, REFERENCE, limit

if TYPE_CHECKING:
    from rich.console import Console

HEADS = ("method", "ms", "time", "target", "memory", "parameters", "first step")
Block = tuple[str, str, str, str]


def title(method: str) -> str:
    """A contender's name as printed.

    >>> title("ktied-local")
    'KTied k=2, local'
    """
    if method == REFERENCE:
        return "deterministic"
    known = CONTENDERS.get(method) or PEERS.get(method)
    return known.title if known is not None else method


def blocks(results: Results) -> list[Block]:
    """(group, network, phase, mode) of what was measured, in the order of the settings."""
    there = {(c["group"], c["network"], c["phase"], c["mode"]) for c in results.cells}
    order = [
        (group, network, phase, mode)
        for group in ("own", "peers")
        for network in NETWORKS
        for phase in PHASES
        for mode in MODES
    ]
    return [block for block in order if block in there]


def rows(results: Results, block: Block) -> list[list[str]]:
    """A block's rows as printed: the deterministic network first, then in the order of the settings."""
    names = [REFERENCE, *PEERS, *CONTENDERS]
    found = [(name, results.find(*block, name)) for name in names]
    return [row(results.device, name, cell) for name, cell in found if cell is not None]


def row(device: str, name: str, cell: Cell) -> list[str]:
    """One cell in words, or why there is none.

    >>> row("cpu", "rank1", {"group": "own", "network": "mlp", "phase": "train", "mode": "eager",
    ...     "milliseconds": 40.0, "quartiles": [39.0, 41.5], "ratio": 1.7, "ratio_error": 0.012, "rounds": 15,
    ...     "memory_ratio": 1.5, "parameters": 100, "parameters_ratio": 1.02, "first_ratio": None})
    ['Rank1 normal, K=4, per example', '40.0 (39.0–41.5)', '1.70 ± 0.01', '≤ 1.9 ✓', '1.50', '+2.00 %', '–']
    """
    if "error" in cell:
        return [title(name), "failed", short(cell["error"]), "", "", "", ""]
    low, high = cell["quartiles"]
    first = "–"
    if cell.get("first_seconds") is not None and cell.get("first_ratio") is not None:
        first = f"{cell['first_seconds']:.1f} s, {cell['first_ratio']:.2f}"
        first += verdict(device, cell, name, "first")
    memory = "–" if cell.get("memory_ratio") is None else f"{cell['memory_ratio']:.2f}"
    return [
        title(name),
        f"{milliseconds(cell['milliseconds'])} ({milliseconds(low)}–{milliseconds(high)})",
        ratio(cell),
        verdict(device, cell, name, "time").strip(" ()"),
        memory + verdict(device, cell, name, "memory"),
        f"{100 * (cell.get('parameters_ratio', 1.0) - 1):+.2f} %",
        first,
    ]


def ratio(cell: Cell) -> str:
    """A ratio with the standard error of its median.

    >>> ratio({"ratio": 1.234, "ratio_error": 0.002})
    '1.23 ± 0.00'
    """
    error = cell.get("ratio_error")
    return f"{cell['ratio']:.2f}" + (f" ± {error:.2f}" if error is not None else "")


def value(cell: Cell, quantity: str) -> float | None:
    """The ratio that a target bounds."""
    found = cell.get({"time": "ratio", "memory": "memory_ratio", "first": "first_ratio"}[quantity])
    return None if found is None else float(found)


def verdict(device: str, cell: Cell, name: str, quantity: str) -> str:
    """The target and whether it holds, in parentheses; nothing where there is no target."""
    bound = limit(device, cell["network"], cell["phase"], cell["mode"], name, quantity)
    measured = value(cell, quantity)
    if bound is None or measured is None or cell["group"] != "own":
        return ""
    return f" (≤ {bound:g} {'✓' if measured <= bound else '✗'})"


def short(text: str, length: int = 90) -> str:
    """A message cut to a table's width."""
    text = text.replace("|", "/").replace("`", "'")
    return text if len(text) <= length else text[: length - 1] + "…"


def heading(block: Block) -> str:
    """What a block shows.

    >>> heading(("own", "mlp", "train", "eager"))
    'MLP 784-400-400-10, 1,024 rows: train, eager'
    """
    group, network, phase, mode = block
    return f"{NETWORKS[network].title}: {phase}, {mode}" + (", beside peers" if group == "peers" else "")


def print_table(results: Results, screen: Console) -> None:
    """All blocks on the screen."""
    from rich.table import Table

    for block in blocks(results):
        table = Table(title=heading(block), title_justify="left")
        for index, head in enumerate(HEADS):
            table.add_column(head, justify="left" if index == 0 else "right", overflow="fold")
        for cells in rows(results, block):
            table.add_row(*cells)
        screen.print(table)
        kept = [cell for cell in results.cells if key(cell)[:4] == block and "rounds" in cell]
        if any(cell["disturbed"] for cell in kept):
            screen.print("Other processes disturbed nearly every round: measure again on an idle machine.")


def milliseconds(value: float) -> str:
    """A time with three digits.

    >>> milliseconds(1234.5), milliseconds(20.63), milliseconds(0.4567)
    ('1,234', '20.6', '0.457')
    """
    return f"{value:.3g}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"

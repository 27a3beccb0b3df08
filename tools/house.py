"""The house: floors of the package, their lines, and who imports whom: ``python tools/house.py --picture house.svg``.

A floor is a folder of the package's top level; files beside them are the floor "(top)". An import is counted once for
each file and module of ours that it names, wherever in the file it stands, those for type checkers alone left out.
Floors are ordered so that as few imports as possible point up; those that do are drawn in red.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

TOP = "(top)"
DOWN, UP, INK, WALL = "#4a6fa5", "#c0392b", "#222222", "#eef1f6"


@dataclass
class Floor:
    """One folder of the package."""

    name: str
    files: int = 0
    lines: int = 0
    imports: Counter[str] = field(default_factory=Counter)  # of other floors


def survey(package: Path) -> dict[str, Floor]:
    """Every floor of the package, from the syntax of its files."""
    files = sorted(package.rglob("*.py"))
    modules = {name_of(package, file) for file in files}
    floors: dict[str, Floor] = {}
    for file in files:
        text = file.read_text(encoding="utf-8")
        name = floor_of(file.relative_to(package).as_posix())
        floor = floors.setdefault(name, Floor(name))
        floor.files += 1
        floor.lines += len(text.splitlines())
        for module in imported(ast.parse(text), name_of(package, file), file.name == "__init__.py", modules):
            target = floor_of("/".join(module.split(".")[1:]) + "/" * is_folder(package, module))
            floor.imports[target] += target != name
    for floor in floors.values():
        floor.imports = +floor.imports
    return floors


def name_of(package: Path, file: Path) -> str:
    """The module's name: ``slimbayes.core.draw`` for ``core/draw.py``."""
    parts = (package.name, *file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_folder(package: Path, module: str) -> bool:
    """Whether a module is a folder inside the package."""
    return "." in module and package.joinpath(*module.split(".")[1:]).is_dir()


def floor_of(place: str) -> str:
    """The floor of a file, or of a folder if its name ends so.

    >>> floor_of("core/draw.py"), floor_of("fast.py"), floor_of("core/")
    ('core', '(top)', 'core')
    """
    return place.split("/")[0] if "/" in place else TOP


def imported(tree: ast.AST, module: str, package: bool, known: set[str], checked: bool = False) -> set[str]:
    """The modules among ``known`` that a file imports; ``checked``: for type checkers alone too."""
    found: set[str] = set()
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        if not checked and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            left += node.orelse
            continue
        left += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                parents = parents[: len(parents) - node.level + package]
                base = ".".join([*parents, *([base] if base else [])])
            named = {f"{base}.{alias.name}" for alias in node.names}
            found |= (named & known) | ({base} if named - known else set())
    return (found & known) - {module}


def ordered(floors: dict[str, Floor]) -> list[Floor]:
    """From the ground up, with few imports upwards (Eades, Lin and Smyth's heuristic of 1993).

    What imports nothing of the floors left goes to the ground, what none of them imports to the top; else the one that
    is imported most often for each time that it imports goes to the ground.
    """
    left = dict(floors)
    ground: list[Floor] = []
    top: list[Floor] = []
    while left:
        out = {name: sum(floor.imports[other] for other in left) for name, floor in left.items()}
        within = {name: users(floor, left) for name, floor in left.items()}
        name = max(left, key=lambda n: (out[n] == 0, within[n] == 0, within[n] - out[n]))
        (ground if out[name] == 0 or within[name] else top).append(left.pop(name))
    return ground + top[::-1]


def users(floor: Floor, floors: dict[str, Floor]) -> int:
    """How many imports of other floors name this one."""
    return sum(other.imports[floor.name] for other in floors.values())


def table(floors: list[Floor]) -> str:
    """Text, the ground floor last."""
    rows = [f"{'floor':<14}{'files':>6}{'lines':>8}  imports"]
    for floor in reversed(floors):
        names = ", ".join(f"{name} {count}" for name, count in floor.imports.most_common())
        rows.append(f"{floor.name:<14}{floor.files:>6}{floor.lines:>8}  {names}".rstrip())
    rows.append(f"{'together':<14}{sum(f.files for f in floors):>6}{sum(f.lines for f in floors):>8}")
    return "\n".join(rows)


def picture(floors: list[Floor]) -> str:
    """An SVG: a bar for every floor, the ground floor last, and an arc for the imports of one floor by another."""
    height, wide, left = 44, 300, 330
    size = (2 * left + wide, height * len(floors) + 20)
    most = max(floor.lines for floor in floors)
    middle = {floor.name: 10 + height * (len(floors) - i - 0.5) for i, floor in enumerate(floors)}
    arcs, bars = [], []
    for floor in floors:
        y = middle[floor.name]
        for name, count in sorted(floor.imports.items()):
            arcs.append(_arc(left, wide, y, middle[name], count))
        bars.append(
            f'<rect x="{left}" y="{y - 15}" width="{wide}" height="30" rx="4" fill="{WALL}" stroke="{INK}"/>'
            f'<rect x="{left}" y="{y + 11}" width="{wide * floor.lines / most:.0f}" height="4" fill="{INK}"/>'
            f'<text x="{left + 10}" y="{y + 5}" font-weight="bold">{escape(floor.name)}</text>'
            f'<text x="{left + wide - 10}" y="{y + 5}" text-anchor="end">{floor.files} files, {floor.lines:,} lines'
            "</text>"
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        f'font-size="13" fill="{INK}"><rect width="100%" height="100%" fill="white"/>'
        + "\n".join(arcs + bars)
        + "\n</svg>\n"
    )


def _arc(left: int, wide: int, start: float, end: float, count: int) -> str:
    """Imports that point down at the right, up at the left: the further, the wider; the more, the thicker."""
    down = end > start
    x, side = (left + wide, 1) if down else (left, -1)
    reach = x + side * (20 + 0.3 * abs(end - start))
    reach = max(12.0, min(reach, 2 * left + wide - 12.0))
    colour, thick = (DOWN, 0.7 + min(count, 100) / 30) if down else (UP, 1.5)
    tip = (0.25 * x + 0.75 * reach, (start + end) / 2)
    return (
        f'<path d="M{x},{start} C{reach:.0f},{start} {reach:.0f},{end} {x},{end}" fill="none" stroke="{colour}" '
        f'stroke-width="{thick:.1f}" stroke-opacity="0.6"/>'
        f'<path d="M{x},{end} l{8 * side},-4 v8 z" fill="{colour}"/>'
        f'<text x="{tip[0]:.0f}" y="{tip[1]:.0f}" font-size="10" fill="{colour}" text-anchor="middle">{count}</text>'
    )


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and write the picture if one is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "slimbayes"
    )
    parser.add_argument("--picture", type=Path, metavar="SVG", help="write the picture to this file")
    options = parser.parse_args(arguments)
    floors = ordered(survey(options.package.resolve()))
    if not floors:
        parser.error(
            f"{options.package} holds no Python files: give the folder of a package, as src/slimbayes"
        )
    print(table(floors))
    if options.picture:
        options.picture.write_text(picture(floors), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

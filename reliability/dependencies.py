"""Licences and known vulnerabilities of what the extras install: ``python -m reliability.dependencies``.

Vulnerabilities are looked up by pip-audit, a program of its own (``--audit PATH``), which asks the network for its
data. What it could not look up is counted as such, and never as a pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from reliability.figures import RESULTS, Figure, write_figures

ROOT = Path(__file__).parents[1]


def licences() -> Any:
    """tools/licences.py as a module."""
    spec = importlib.util.spec_from_file_location("licences_tool", ROOT / "tools" / "licences.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["licences_tool"] = module
    spec.loader.exec_module(module)
    return module


def audited(program: str | None, requirements: list[str]) -> tuple[int, list[str]]:
    """How many packages pip-audit has looked up, and the vulnerabilities that it knows of."""
    if program is None:
        return 0, []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("\n".join(requirements) + "\n")
        words = [program, "-r", str(file), "--no-deps", "--disable-pip", "-f", "json"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, []  # it could not ask
    looked_up = [entry for entry in found if "skip_reason" not in entry]
    return len(looked_up), [f"{e['name']} {e['version']}: {v['id']}" for e in looked_up for v in e["vulns"]]


def figures(program: str | None) -> tuple[list[Figure], dict[str, Any]]:
    """What is known of the packages, and what is not."""
    tool = licences()
    found, _ = tool.packages()
    wrong = tool.problems(found)
    weak = [package.name for package in found if package.kind == "weak copyleft"]
    exact = [f"{package.name}=={package.version.partition('+')[0]}" for package in found]
    number, vulnerabilities = audited(program, exact)
    if number == 0:
        audit = Figure("known vulnerabilities (pip-audit)", "not available offline", "0", None)
    else:
        whole = number == len(found)
        value = f"{len(vulnerabilities)} in {number} of {len(found)} packages"
        audit = Figure(
            "known vulnerabilities (pip-audit)", value, "0", False if vulnerabilities else whole or None
        )
    made = [
        Figure(
            "packages without a licence for use beside Apache-2.0",
            f"{len(wrong)} of {len(found)}",
            "0",
            not wrong,
        ),
        audit,
    ]
    return made, {
        "weak_copyleft": weak,
        "problems": wrong,
        "vulnerabilities": vulnerabilities,
        "audited": number,
    }


def main() -> None:
    """Look and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--audit", metavar="PATH", help="of the program pip-audit")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    start = time.monotonic()
    made, details = figures(given.audit)
    notes = [
        f"Weak copyleft, which asks nothing of their users: {', '.join(details['weak_copyleft']) or 'none'}."
    ]
    if not details["audited"]:
        notes.append(
            "The data of pip-audit could not be reached where this was measured: no package was looked up."
        )
    command = "python -m reliability.dependencies --audit pip-audit"
    write_figures("dependencies", command, made, time.monotonic() - start, notes, given.folder, **details)
    print(json.dumps([figure.__dict__ for figure in made], indent=1))


if __name__ == "__main__":
    main()

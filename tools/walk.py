"""How far one training step walks through the code, and what an import loads: ``python tools/walk.py``.

A step is ``sb.draw``, ``sb.elbo`` and the backward pass of a Rank1 Linear layer, in eager mode with fast paths off and
after steps that filled every cache. Counted are the different functions of ours that are entered in it, each defined by
a ``def`` in the package: comprehensions and lambdas count as part of what they stand in.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "slimbayes"
Walk = dict[str, set[str]]  # by file, the functions entered

# Each in a process of its own: seconds of `import torch`, then of `import slimbayes`, and the modules this added.
TIMED = f"""
import json, sys, time
start = time.perf_counter(); import torch
middle = time.perf_counter(); import {PACKAGE}
end = time.perf_counter()
ours = sorted(name for name in sys.modules if name.split(".")[0] == "{PACKAGE}")
print(json.dumps([middle - start, end - middle, ours]))
"""


def walked(step: Callable[[], object], package: Path) -> Walk:
    """Functions of the package that ``step`` enters in this thread, by file."""
    found: Walk = {}

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if (
            event == "call"
            and code.co_filename.startswith(f"{package}/")
            and not code.co_name.startswith("<")
        ):
            name = getattr(code, "co_qualname", f"{code.co_name}:{code.co_firstlineno}")  # Python 3.11 has it
            found.setdefault(str(Path(code.co_filename).relative_to(package)), set()).add(name)

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        step()
    finally:
        sys.setprofile(before)
    return dict(sorted(found.items()))


def training_step(layers: int = 1) -> Callable[[], object]:
    """The step that is walked: of one Linear layer, or of several with ReLU between them."""
    import torch
    from torch import nn

    import slimbayes as sb

    torch.manual_seed(0)
    parts = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.ReLU())][:-1]
    model = sb.bayesianize(nn.Sequential(*parts), sb.Rank1())
    x, y = torch.randn(16, 8), torch.randint(8, (16,))

    def step() -> None:
        model.zero_grad()
        sb.elbo(sb.draw(model, x), y, model, num_data=16).loss.backward()

    return step


def walk_of_step(layers: int = 1, warm: int = 3) -> Walk:
    """The walk of one step, with all fast paths off, after a few that nobody watches."""
    import slimbayes as sb

    step = training_step(layers)
    with sb.fast_paths(False):
        for _ in range(warm):
            step()
        return walked(step, Path(sb.__file__).parent)


def imported(repeats: int) -> tuple[float, float, list[str]]:
    """Least seconds of ``import torch`` and of ``import slimbayes`` after it, and the modules of ours it loads."""
    runs = [
        json.loads(subprocess.run([sys.executable, "-c", TIMED], check=True, capture_output=True).stdout)
        for _ in range(repeats)
    ]
    return min(run[0] for run in runs), min(run[1] for run in runs), runs[0][2]


def main(arguments: list[str] | None = None) -> int:
    """Print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the functions, files and modules too")
    parser.add_argument("--layers", type=int, default=1, help="Linear layers in the network (1)")
    parser.add_argument("--repeats", type=int, default=3, help="imports, of which the fastest counts (3)")
    options = parser.parse_args(arguments)

    walk = walk_of_step(options.layers)
    print(f"one training step: {sum(map(len, walk.values()))} functions in {len(walk)} files")
    if options.list:
        for file, functions in walk.items():
            print(f"  {file}: {', '.join(sorted(functions))}")
    torch, ours, modules = imported(options.repeats)
    print(
        f"import {PACKAGE}: {len(modules)} modules of ours, {ours:.2f} s after {torch:.2f} s of import torch"
    )
    if options.list:
        print("\n".join(f"  {name}" for name in modules))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where the EMP paper's image networks, as they are run here, differ from the paper's, in words."""

from __future__ import annotations

from collections.abc import Sequence

from slimbayes.lab.experiments.emp_recipes import EXTRAS, EXTRAS_NOISE, INIT_NOISE, SIZES, prepare, size_of
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.session import Session

PAPER_NETWORK, PAPER_EPOCHS, PAPER_SAMPLES = "pyramidnet(depth=110, alpha=270)", 400, 200
OPEN = (
    "what the paper leaves open is taken so: norms share their running statistics among components, an assignment is "
    "drawn once per forward pass (a batch in training, all test examples in evaluation), probabilities are averaged, "
    "and n counts all examples, those of dropped bins too"
)


def title(session: Session, setting: str) -> str:
    """A table's title: the data and the network that were run.

    >>> title(Session("gpu", "work"), "cifar100")
    'CIFAR-100, wrn(depth=28, width=4)'
    """
    size = size_of(setting, session.scale)
    names = {"cifar100": "CIFAR-100", "cifar10": "CIFAR-10", "digits": "Digits (a test of the code)"}
    return f"{names.get(size.data, size.data)}, {size.network}"


def deviations(session: Session, setting: str, jobs: Sequence[Job]) -> list[str]:
    """Where a setting at this scale differs from the paper's."""
    size = size_of(setting, session.scale)
    wanted = SIZES["cifar10-c" if setting == "cifar10-c" else "cifar100", "paper"].data
    said = []
    if size.data != wanted:
        said.append(f"trained on {size.data}, not on {wanted}: only a test that the code runs.")
    else:
        said.append(session.used.get(size.data, {}).get("source", ""))
    if size.network != PAPER_NETWORK:
        said.append(f"{size.network} instead of PyramidNet-110-α270; the same layers are patched.")
    if (size.epochs, size.schedule) != (PAPER_EPOCHS, "constant"):
        falls = "a cosine's fall of the learning rate to 0" if size.schedule == "cosine" else size.schedule
        said.append(
            f"{size.epochs} epoch{'s' * (size.epochs > 1)} with {falls} instead of {PAPER_EPOCHS} at a constant rate."
        )
    if size.held_out:
        said.append(
            f"trained without the last {size.held_out:,} training examples, which fit the weights of stacking."
        )
    said.append(start_of(EXTRAS_NOISE if setting == EXTRAS else INIT_NOISE))
    said.append(f"{OPEN}.")
    if setting == "cifar10-c":
        said += _corrupted(session)
    elif size.samples[-1] != PAPER_SAMPLES:
        said.append(f"predictions average at most {size.samples[-1]} draws, the paper's {PAPER_SAMPLES}.")
    if session.device.type == "cuda":
        said.append("trained and evaluated in bfloat16 (mixed); probabilities are averaged in float32.")
    return [f"{setting}: {text}" for text in said if text]


def start_of(noise: float) -> str:
    """How components start, in words.

    >>> start_of(0.1)
    'components start apart by a standard deviation of 0.1 (init_noise); the paper has them random and says no more.'
    """
    if noise:
        apart = f"components start apart by a standard deviation of {noise:g} (init_noise)"
        return f"{apart}; the paper has them random and says no more."
    return (
        "components start equal (init_noise=0.0), which of the starts in emp/extras (WRN-16-4 on CIFAR-100) has the "
        "lowest NLL on held-out examples, for EMP within the error of 0.03; the paper has them random and says no more."
    )


def _corrupted(session: Session) -> list[str]:
    size = size_of("cifar10-c", session.scale)
    test = len(prepare(session, "cifar10-c").data.test)
    images = "all test images" if size.corrupted >= test else f"the first {size.corrupted:,} test images"
    return [
        "CIFAR-10 with slimbayes' own corruptions in the place of ImageNet-C: the layout of the paper's table, not its "
        "numbers.",
        f"errors on {images}, for every type and severity and for the clean error; {size.samples[-1]} draws, the "
        f"paper's 100.",
        "every network's errors are divided by those of the vanilla network of the same seed.",
    ]

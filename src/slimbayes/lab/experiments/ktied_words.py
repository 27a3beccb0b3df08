"""How the networks of the k-tied experiments were chosen and where they differ from the paper's, in words."""

from __future__ import annotations

from collections.abc import Sequence

from slimbayes.lab.experiments.ktied_grid import searched
from slimbayes.lab.experiments.ktied_recipes import CHOSEN, LABELS, Job, prepare, recipe, size_of
from slimbayes.lab.experiments.session import Session


def choices(session: Session, setting: str, purpose: str = "by-nll") -> str:
    """How the rows of a setting in Figure 6 were chosen, and how much the KL weighed at their end, in words."""
    size = size_of(setting, session.scale)
    prepared = prepare(session, setting)
    parts = []
    for label in LABELS:
        training = recipe(session, setting, purpose, label).training
        steps = size.epochs * (prepared.num_train // size.batch_size)
        weight = training.kl_factor(steps - 1, steps)
        rise = "not annealed" if training.kl_coefficient is None else f"{training.kl_coefficient:g} per batch"
        parts.append(f"{label} lr {training.lr:g} ({training.schedule}), {rise}, at the end {weight:.2g}")
    if purpose == "by-elbo":
        return (
            f"{setting}: learning rate, prior scale and annealing have the lowest validation −ELBO of the sweep "
            f"(ktied/tuning) for mean-field and 2-tied; 1- and 3-tied take 2-tied's: {'; '.join(parts)}."
        )
    prior = CHOSEN[setting, purpose, "2-tied"].prior
    return (
        f"{setting}: learning rate and annealing of mean-field and 2-tied have the lowest validation NLL of the sweep "
        f"(ktied/tuning), not the lowest −ELBO, at the prior scale {prior:g}; 1- and 3-tied take 2-tied's: "
        f"{'; '.join(parts)}. Their −ELBO is not what was chosen for, and is not to be compared with the paper's."
    )


def chosen(session: Session, setting: str) -> list[str]:
    """How the rows of a setting in Figure 6 were chosen, and from what, in words."""
    if setting == "imdb":
        return posthoc_choice(session, setting)
    return [choices(session, setting), searched(setting)]


def posthoc_choice(session: Session, setting: str) -> list[str]:
    """How the networks of the post-hoc study were chosen, in words; the residual network has the paper's values."""
    if setting.startswith("resnet"):
        return []
    if setting == "imdb":
        training = recipe(session, setting, "converged", "Mean-field").training
        prior = CHOSEN[setting, "converged", "Mean-field"].prior
        return [
            f"{setting}: one set of networks, trained without annealing, serves Table 2 and Figures 3, 6 and 7. They "
            f"have lr {training.lr:g} (constant) and the prior scale {prior:g}, the largest of the paper's grids, with "
            f"which σ comes from 0.01 to the prior's scale soonest; other values were not searched.",
            f"{setting}: the head has two outputs and a softmax in the place of a sigmoid; it is mean-field in all "
            f"rows and not counted.",
        ]
    training = recipe(session, setting, "converged", "Mean-field").training
    prior = CHOSEN[setting, "converged", "Mean-field"].prior
    return [
        f"{setting}: the mean-field networks, trained without annealing, have the lowest validation −ELBO of the sweep "
        f"(ktied/tuning): lr {training.lr:g} ({training.schedule}), prior scale {prior:g}. A schedule of the learning "
        f"rate is ours; the paper names none."
    ]


def probed_choice(session: Session, setting: str) -> list[str]:
    """How the networks whose −ELBO is followed step by step were trained, in words."""
    if setting == "imdb":
        return posthoc_choice(session, setting)
    training = recipe(session, setting, "probed", "Mean-field").training
    prior = CHOSEN[setting, "by-nll", "Mean-field"].prior
    return [
        f"{setting}: the networks of the tables and curves by step have lr {training.lr:g} ({training.schedule}), the "
        f"prior scale {prior:g} and no annealing. The paper does not give its values; with no prior scale of its grid "
        f"does the −ELBO start as high as it prints."
    ]


def deviations(session: Session, setting: str, jobs: Sequence[Job]) -> list[str]:
    """Where a setting at this scale differs from the paper's, in words."""
    size, paper = size_of(setting, session.scale), size_of(setting, "paper")
    said = []
    if size.data != paper.data:
        said.append(
            f"{setting}: trained on {size.data}, not on {paper.data}: only a test that the code runs."
        )
    elif size.data.startswith("cifar"):
        said.append(f"{setting}: {session.used.get(size.data, {}).get('source', '')}")
    if size.epochs != paper.epochs:
        words = f"{setting}: {size.epochs} epoch{'s' * (size.epochs > 1)} instead of {paper.epochs}"
        words += f", with {size.lr_scale:g} times the learning rate" if size.lr_scale != 1 else ""
        if setting.startswith("resnet"):
            words += f"; the KL has its full weight after {size.epochs * 50 / 700:.1f} epochs instead of 50"
        said.append(words + ".")
    if size.samples != 100:
        said.append(f"{setting}: predictions average {size.samples} weight samples, the paper's 100.")
    if setting.startswith("resnet") and session.device.type == "cuda":
        said.append(
            f"{setting}: trained in bfloat16 (mixed), evaluated in float32 with TensorFloat-32 products."
        )
    elif session.device.type == "cuda":
        said.append(f"{setting}: float32 with TensorFloat-32 matrix products.")
    if not setting.startswith("resnet"):
        said.append(
            f"{setting}: mean-field standard deviations are softplus(ρ), not exp: the same to 1 % while σ < 0.02, and "
            "their gradients have the same signal-to-noise ratio."
        )
    return said

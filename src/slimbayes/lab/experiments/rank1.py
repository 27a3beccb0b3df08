"""The rank-1 paper's figures, tables and theorem (Dusenberry et al., 2020); figures by the ICML version's numbers."""

from __future__ import annotations

from slimbayes.lab.experiments import rank1_settings as settings
from slimbayes.lab.experiments import rank1_tables as tables
from slimbayes.lab.experiments.entry import Experiment, Setting

_CLEAN = ("nll", "accuracy", "ece")
_BOTH = (*_CLEAN, "c_nll", "c_accuracy", "c_ece")
_CORRUPTED = ("c_nll", "c_accuracy", "c_ece")
_PLOT = "The paper draws the numbers and prints none."
_ROWS = 512  # B · K, kept while K varies


def _mixture(components: int) -> Setting:
    batch = _ROWS // components
    method = {f"K = {components}": settings.gaussian(components=components)}
    name = f"cifar10-k{components}"
    return settings.rank1_cifar(method, name=name, batch_size=batch, lr=0.1 * batch / 128)


def _severity(figure: int, statistic: str, title: str, chosen: tuple[Setting, ...]) -> Experiment:
    """A figure of metrics against severity: the mean or the median over types of corruption."""
    return Experiment(
        f"rank1/figure{figure}", f"Figure {figure}", f"{title} by severity, {statistic} over types",
        "The captions have rank-1 networks best in every metric as the corruption grows.",
        chosen, _CORRUPTED, 10, errata=(_PLOT, *_severity_errata(chosen)),
    )  # fmt: skip


def _severity_errata(chosen: tuple[Setting, ...]) -> tuple[str, ...]:
    cifar = any(setting.data.startswith("cifar") for setting in chosen)
    return (*tables.CIFAR_ERRATA, tables.SAMPLES) if cifar else (tables.SUM, tables.DROPOUT, tables.DECAY)


_FIGURES = (
    Experiment(
        "rank1/figure1", "Figure 1", "Priors that rank-1 factors induce on a weight",
        "For w Normal, a Normal or Cauchy r makes w·r sparse, the Cauchy with heavier tails; an inverse-gamma r² makes "
        "it Student's t.",
        errata=(_PLOT, "The parameters of the three priors are not given."),
    ),
    Experiment(
        "rank1/figure2", "Figure 2", "Distributions over r, s or both",
        "The three are close on the test set; distributions over both are best under corruption.",
        (
            settings.rank1_cifar(
                {
                    "r (outputs)": settings.gaussian(options=", random='output'"),
                    "s (inputs)": settings.gaussian(options=", random='input'"),
                    "both": settings.gaussian(),
                }
            ),
        ),
        _BOTH, 3,
        errata=(
            _PLOT, "The prior's mean and scale and l2 were tuned for each; the winners are not given.",
            *tables.CIFAR_ERRATA,
        ),
    ),
    Experiment(
        "rank1/figure3", "Figure 3", "The number of components",
        "Every metric improves from K = 1 to 8 and falls at 16, at a constant number B·K of rows per step.",
        tuple(_mixture(k) for k in (1, 2, 4, 8, 16)), _BOTH, 5,
        errata=(
            _PLOT, "The number of epochs was tuned for each K; the winners are not given.",
            "The learning rate follows B, as in the reference code.",
            "The text's 0.4 % more parameters for K = 10 on ResNet-50 is K = 1; K = 10 adds 4.1 %.",
            *tables.CIFAR_ERRATA,
        ),
    ),
    Experiment(
        "rank1/figure4", "Figure 4", "Mixture or average likelihood in training",
        "Training on the log of the mixture's likelihood fits as well and generalises worse, as do its members.",
        (
            settings.rank1_cifar({"Average": settings.gaussian()}, name="cifar10-average", reduction="average"),
            settings.rank1_cifar({"Mixture": settings.gaussian()}, name="cifar10-mixture", reduction="mixture"),
        ),
        _CLEAN,
        errata=(
            _PLOT, "The gradient of the log-mixture is ∇p_k' / Σ_k p_k (printed K times too large), the average's is "
            "∇p_k' / (K p_k') (printed 1 / (K ∇p_k')).",
            "Appendix D.1 lacks a minus before yᵀ log softmax.", *tables.CIFAR_ERRATA,
        ),
    ),
    Experiment(
        "rank1/figure-v1-5", "Figure 5 of arXiv v1", "The spreads' start by a dropout rate",
        "A start close to zero gives far better accuracy at a small cost in calibration.",
        (
            settings.rank1_cifar(
                {f"p = {rate:g}": settings.gaussian(rate=rate) for rate in (1e-3, *settings.NOISY)}
            ),
        ),
        _CLEAN, 96,
        errata=(
            _PLOT, "The rates on the axis are not in the text; taken: the tables' 0.001 and the range 0.1 to 0.3.",
            "The 96 runs of a box are those of a search over other hyper-parameters.", *tables.CIFAR_ERRATA,
        ),
    ),
    Experiment(
        "rank1/figure5", "Figure 5", "Disagreement of members against accuracy and log-likelihood",
        "At equal or better accuracy the members of rank-1 networks disagree more than BatchEnsemble's.",
        (
            settings.gaussian_cifar(10), settings.batch_ensemble_cifar(10),
            settings.gaussian_cifar(100), settings.batch_ensemble_cifar(100),
        ),
        ("disagreement", "accuracy", "nll"),
        errata=(
            _PLOT, "The text divides by 1 − accuracy of a member; the reference library divides by the ensemble's.",
            "Which checkpoints at the end of training are taken is not said.", "It is Figure 6 of arXiv v1.",
            *tables.CIFAR_ERRATA,
        ),
    ),
    _severity(6, "mean", "ImageNet-C", settings.imagenet()),
    _severity(7, "mean", "CIFAR-10-C and CIFAR-100-C", (*settings.cifar(10), *settings.cifar(100))),
    Experiment(
        "rank1/figure9", "Figure 9", "Real or positive priors",
        "Normal factors beat log-normal ones in NLL and ECE on the test set; under corruption neither wins.",
        (
            settings.rank1_cifar(
                {
                    "Real (Normal)": settings.gaussian(),
                    "Positive (log-normal)": "Rank1(components=4, posterior='lognormal', prior=LogNormal(0, 0.1), "
                    "random_sign_init=-0.5, dropout_rate=0.001)",
                }
            ),
        ),
        _BOTH, 3,
        errata=(
            _PLOT, "The prior's scale and l2 were tuned for each; the winners are not given.",
            "In the reference code log-normal factors start around 1 in log-space (median e), with a prior around 0.",
            *tables.CIFAR_ERRATA,
        ),
    ),
    _severity(10, "median", "CIFAR-10-C", settings.cifar(10)),
    _severity(11, "median", "CIFAR-100-C", settings.cifar(100)),
    _severity(12, "median", "ImageNet-C", settings.imagenet()),
)  # fmt: skip
_THEOREM = Experiment(
    "rank1/theorem1", "Theorem 1", "Local variance of the score under rank-1 perturbations",
    "Around a minimum of a dense network, a perturbation of s with covariance Σ moves the score as much as a full-rank "
    "perturbation of W with covariance W_ij Σ_jl W_kl.",
    errata=(
        "The covariance is printed with Σ_jk; it must be Σ_jl.",
        "Additive perturbations are called equivalent; σ' = w_ij σ_i depends on j, so it is no rank-1 additive noise.",
    ),
)  # fmt: skip
_OURS = (
    Experiment(
        "rank1/collapse", "Beyond: collapse", "Components that stay apart, and components that become one",
        "Ours: how far the components' factors are apart while they train, by how the KL is reduced over components "
        "and when it grows; what is left of the mixture's gain where they become copies.",
        (
            settings.rank1_cifar(
                {
                    "KL summed": settings.gaussian(), "KL averaged": settings.gaussian(options=", kl_reduction='mean'"),
                    "KL of the mixture": settings.gaussian(options=", kl_reduction='monte_carlo'"),
                }
            ),
            settings.rank1_cifar({"KL by 40 %": settings.gaussian()}, name="cifar10-faster", kl_annealing=0.4),
            settings.rank1_cifar({"KL at once": settings.gaussian()}, name="cifar10-at-once", kl_annealing=0.0),
            settings.rank1_cifar({"KL from 40 %": settings.gaussian()}, name="cifar10-later", kl_start=0.4),
            settings.cauchy_cifar(), settings.batch_ensemble_cifar(), settings.baselines_cifar()[0],
        ),
        ("spread", "predicted", "scale", "disagreement", *_BOTH), errata=tables.CIFAR_ERRATA, beyond=True,
    ),
    Experiment(
        "rank1/tuning", "Beyond: tuning", "Penalties, reductions of the KL and first scales on held-out images",
        "Ours: what a short schedule wants of the four main methods, each with the same penalties, by the NLL of "
        "training images that are held out.",
        (*settings.tuned(2e-4), *settings.tuned(5e-4)), ("nll", "accuracy", "ece", "spread", "scale"),
        errata=tables.CIFAR_ERRATA, beyond=True,
    ),
    Experiment(
        "rank1/shared", "Beyond: shared batches", "What components that share each batch want, on held-out images",
        "Ours: schedules of the learning rate, first scales and distances of the factors and penalties where an image "
        "is seen by one component alone, so that an epoch costs what a plain network's does.",
        settings.shared(), ("nll", "accuracy", "ece", "spread", "scale"), errata=tables.CIFAR_ERRATA, beyond=True,
    ),
    Experiment(
        "rank1/ood", "Beyond: foreign images", "House numbers told from CIFAR-10",
        "Ours: the AUROC of a prediction's entropy and of its mutual information for telling SVHN from CIFAR-10.",
        settings.cifar(10), ("auroc_entropy", "auroc_mutual_information"), errata=tables.CIFAR_ERRATA, beyond=True,
    ),
)  # fmt: skip
ENTRIES: tuple[Experiment, ...] = (*_FIGURES, *tables.ENTRIES, _THEOREM, *_OURS)

"""The k-tied paper's tables and figures (Swiatkowski et al., 2020), and ours beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimbayes.lab.experiments import ktied_numbers as numbers
from slimbayes.lab.experiments.entry import Experiment, Setting

_COMMON = {"optimizer": "adam", "schedule": "constant", "augment": False}
_GRID = {**_COMMON, "lr": (1e-4, 3e-4, 1e-3, 3e-3), "epochs": 300, "prior scale": (0.2, 0.3)}
_PLAIN = {**_GRID, "kl_annealing": 0.0}
_ANNEALED = {**_GRID, "kl_coefficient": (5e-5, 5e-6), "kl_every": 100}
_RESNET = {**_COMMON, "lr": 1e-4, "batch_size": 128, "epochs": 700, "kl_annealing": 50 / 700}


def _family(options: str = "") -> dict[str, str]:
    """Mean-field and 1-, 2-, 3-tied at the start of the paper: σ around 0.01."""
    start = f"prior=Normal(0, 0.3), stddev_init=0.01{options}"
    tied = {f"{rank}-tied": f"KTied(rank={rank}, {start})" for rank in (1, 2, 3)}
    return {"Mean-field": f"MeanField({start})", **tied}


def _mean_field(options: str = "") -> dict[str, str]:
    return {"Mean-field": _family(options)["Mean-field"]}


def _mnist(methods: Mapping[str, str], training: Mapping[str, Any], name: str = "mnist") -> Setting:
    words = "Inputs in [−1, 1]; the last 10,000 training examples are the validation set. All three layers are tied."
    return Setting(name, "mlp", "mnist", methods, {**training, "batch_size": 1024}, 100, words)


def _cifar100(methods: Mapping[str, str], training: Mapping[str, Any]) -> Setting:
    words = (
        "Inputs in [0, 1]; the last 10,000 training examples are the validation set. Only the two dense layers are "
        "tied or truncated; the convolutions are mean-field."
    )
    network = "lenet(kernel_size=5)"
    return Setting("cifar100", network, "cifar100", methods, {**training, "batch_size": 1024}, 100, words)


def _imdb(family: bool, training: Mapping[str, Any]) -> Setting:
    words = (
        "20,000 words, length 80; the last 5,000 training examples are the validation set. "
        "Kernel and recurrent kernel (128 × 512 each) are tied or truncated; embedding and biases are point "
        "estimates; no dropout."
    )
    methods = _family(", biases=False") if family else _mean_field(", biases=False")
    network = "lstm(words=20000, embedding=128, hidden=128)"
    return Setting("imdb", network, "imdb", methods, {**training, "batch_size": 128}, 100, words)


def _resnet(name: str, prior: str) -> Setting:
    start = "stddev_init=1.234e-4, estimator='flipout', biases=False, stddev_max=0.1823"
    words = "The mean image is subtracted, no augmentation, all 50,000 examples train; biases and norms are points."
    methods = {"Mean-field": f"MeanField(prior={prior}, {start})"}
    return Setting(name, "tfp_resnet", "cifar10", methods, _RESNET, 100, words)


_TRAINED = (_mnist(_mean_field(), _PLAIN), _cifar100(_mean_field(), _PLAIN), _imdb(False, _PLAIN))
_NORMAL = _resnet("resnet", "Normal(0, 1)")
_HE = _resnet("resnet-he", "HeNormal()")

_GRIDS = "The learning rate and the prior's scale were chosen on validation data; the winners are not given."
_SECOND = "N(0, 0.1), N(0.01, 0.001) and N(0, σ_p I): the second argument is read as a standard deviation."
_NOISE = "Equation 6 prints ε without indices; every weight has its own."
_ERRORS = "The ± are said to be over 100 weight samples; the binomial formula shows that they are over test examples."
_KERNELS = (
    "The text has 3×3 kernels; the parameter counts require 5×5 kernels with padding and two 2×2 pools."
)
_TRUNCATION = (
    "Rows k-tied are the trained mean-field model after a truncated SVD of σ, negative entries set to 0."
)
_COARSE = (_GRIDS, _SECOND, _KERNELS, _NOISE)
_ANNEALING = (
    "A KL weight of 5e-5 or 5e-6 per batch reaches 1 after 20,000 or 200,000 batches; 300 epochs are about 14,600 "
    "(MLP) and 11,700 (CNN), so the KL may never have had its full weight."
)
_WHICH_ANNEAL = (
    "Whether mean-field was annealed as well is not said; here the sweep chooses between annealing and none."
)
_RESNET_ERRATA = (
    "The paper's ResNet-18 is TensorFlow Probability's example: four residual blocks, 14 kernels.",
    "Log standard deviations N(−9, 0.1) are inputs of softplus: σ starts at 1.23e-4, not e^−9.",
    "The cap 0.2 on σ is softplus(log 0.2) = 0.182; the −ELBO of 122 is that of a network whose σ sit at the cap.",
)
_SNR = "E[g²]/Var[g] is at least 1 by construction."

_POSTHOC = (
    Experiment(
        "ktied/table1", "Table 1", "Parameters of variational families",
        "The spreads of an m × n weight matrix cost k(m + n) parameters when tied, mn in mean field.",
        metrics=("parameters",), printed=(numbers.COUNTS,),
        errata=("The table has formulas; they are evaluated for the MLP's first layer, m = 784 and n = 400.",),
    ),
    Experiment(
        "ktied/figure3", "Figure 3", "Spectra of posterior means and standard deviations",
        "In dense layers trained with mean field, one or two singular values explain most of the variance of σ, "
        "and not of the means.",
        _TRAINED, ("explained_1", "explained_2"), errata=_COARSE,
    ),
    Experiment(
        "ktied/figure4", "Figure 4", "Heat maps of σ and of its approximations",
        "The rank-2 approximation of σ in LeNet's first dense layer looks like σ itself, the rank-1 one does not.",
        (_TRAINED[1], _TRAINED[0]), ("explained_1", "explained_2"),
        errata=(*_COARSE[:3], "The paper shows LeNet alone; the MLP's map is ours beside it."),
    ),
    Experiment(
        "ktied/table2", "Table 2", "Mean-field models with σ truncated after training",
        "Truncating σ to rank 2 or 3 after training hardly changes −ELBO, NLL and accuracy; rank 1 has a worse −ELBO.",
        _TRAINED, ("neg_elbo", "nll", "accuracy"), printed=numbers.TABLE2,
        errata=(_TRUNCATION, _ERRORS, *_COARSE),
    ),
    Experiment(
        "ktied/figure5", "Figure 5", "The residual network with σ truncated after training",
        "Convolutions of a residual network have σ of low rank too, and ranks 2 and 3 keep its metrics.",
        (_NORMAL,), ("neg_elbo", "nll", "accuracy", "explained_1", "explained_2"), printed=(numbers.FIGURE5,),
        errata=(_TRUNCATION, _ERRORS, *_RESNET_ERRATA),
    ),
    Experiment(
        "ktied/table3", "Table 3", "Uncertainty of the truncated residual network",
        "Ranks 2 and 3 keep the Brier score, NLL and calibration of mean field; rank 1 does not.",
        (_NORMAL,), ("brier", "nll", "ece"), printed=(numbers.TABLE3,),
        errata=(
            "Brier is TensorFlow Probability's Σp² − 2p_y, from −1 to 1: add 1 for the usual score.",
            "ECE has 15 bins.", _TRUNCATION, _ERRORS, *_RESNET_ERRATA,
        ),
    ),
)  # fmt: skip
_TIED = (
    Experiment(
        "ktied/figure6", "Figure 6", "Trained with tied standard deviations",
        "2- and 3-tied models match mean field with fewer parameters (half for the MLP), their gradients have a far "
        "higher signal-to-noise ratio, and the MLP converges faster.",
        (
            _mnist(_family(), _ANNEALED), _cifar100(_family(), _ANNEALED), _imdb(True, _ANNEALED),
            _mnist(_family(), {**_PLAIN, "steps": 9000}, "mnist-steps"),
        ),
        ("neg_elbo", "nll", "accuracy", "parameters_k", "snr"), seeds=3, printed=numbers.FIGURE6,
        errata=(
            "Three seeds are of the tables by step; the others are of one run.",
            "The tables by step (setting mnist-steps) are without annealing of the KL.",
            "The text promises the SNR of the CNN; the table is of the MLP's second dense layer, over 10 batches.",
            "2-tied LeNet is printed with 2,268 thousand parameters; it has 2,267,408.",
            "IMDB's parameters are printed without the dense head.",
            _ANNEALING, _WHICH_ANNEAL, _SNR, _ERRORS, *_COARSE,
        ),
    ),
    Experiment(
        "ktied/figure7", "Figure 7", "Convergence of the validation −ELBO",
        "Tying speeds up the first part of training for the MLP and the LSTM, little for the CNN.",
        (_mnist(_family(), _PLAIN), _cifar100(_family(), _PLAIN), _imdb(True, _PLAIN)), ("neg_elbo",), seeds=3,
        errata=("Annealing and runs are not given; taken as in Figure 6's table by step.", *_COARSE),
    ),
    Experiment(
        "ktied/table4", "Table 4", "Time of a training step",
        "A step of a 2-tied network takes no longer than one of mean field.",
        (
            Setting(
                "step", "mlp(hidden=(400,))", "mnist",
                {
                    "Point estimate": "Deterministic", "Mean-field": _family()["Mean-field"],
                    "2-tied": _family()["2-tied"],
                },
                {**_COMMON, "batch_size": 1024},
                inputs="Two dense layers, 400 and 10 units. Times are compared as ratios.",
            ),
        ),
        ("step_ms", "step_ratio"), printed=(numbers.TABLE4,),
        errata=(
            "Widths and batch are not printed; taken: 784-400-10 and 1,024 rows, as in the MNIST experiments.",
            "The ratios are computed from the printed times.",
        ),
    ),
    Experiment(
        "ktied/table5", "Table 5", "Parameters of the truncated residual network",
        "σ of rank 2 or 3 in all kernels halves the parameters of the residual network and keeps its metrics.",
        (_NORMAL,), ("neg_elbo", "nll", "accuracy", "parameters", "parameters_percent"),
        printed=(numbers.TABLE5,),
        errata=("The counts hold biases, norms and their moving statistics.", _TRUNCATION, _ERRORS, *_RESNET_ERRATA),
    ),
    Experiment(
        "ktied/figure9", "Figure 9", "The residual network with a He-scaled prior",
        "With the prior N(0, 2 / fan-in) the metrics drop and σ is of low rank all the same.",
        (_HE,), ("neg_elbo", "nll", "accuracy", "explained_1", "explained_2"), printed=(numbers.FIGURE9,),
        errata=(
            "Biases have the prior N(0, 1) in the text, and are point estimates in the network.",
            _TRUNCATION, *_RESNET_ERRATA,
        ),
    ),
    Experiment(
        "ktied/figure10", "Figure 10", "Mean σ of selected layers by epoch",
        "σ goes on changing after the KL has reached its full weight at epoch 50 of 700, and ends large.",
        (_NORMAL,), ("stddev",), errata=("Which layers are selected is not said.", *_RESNET_ERRATA),
    ),
    Experiment(
        "ktied/figure11", "Figure 11", "Heat maps of σ in convolutions",
        "σ of convolutions, flattened to [height · width · inputs, outputs], has the stripes of a low rank.",
        (_NORMAL,), ("explained_1", "explained_2"), errata=_RESNET_ERRATA,
    ),
    Experiment(
        "ktied/figure12", "Figure 12", "Spectra of convolutions",
        "A few singular values explain σ of the convolutions, most clearly of the last, and not their means.",
        (_NORMAL,), ("explained_1", "explained_2"), errata=_RESNET_ERRATA,
    ),
)  # fmt: skip


def _estimators() -> dict[str, str]:
    return {
        f"{label}, {estimator}": f"{text[:-1]}, estimator={estimator!r})"
        for label, text in _family().items()
        if label in ("Mean-field", "2-tied")
        for estimator in ("shared", "flipout", "local")
    }


_BEYOND = (
    Experiment(
        "ktied/local", "Beyond: local", "Figure 6's MNIST table with sampled pre-activations",
        "Whether the local estimator, whose variance is low-rank for tied layers, changes the paper's MNIST table.",
        (_mnist(_family(", estimator='local'"), _ANNEALED),),
        ("neg_elbo", "nll", "accuracy", "parameters_k"), seeds=3, printed=(numbers.SHARED,),
        errata=(_ANNEALING, _GRIDS), beyond=True,
    ),
    Experiment(
        "ktied/by-elbo", "Beyond: chosen by −ELBO", "Figure 6's MNIST table with values chosen by −ELBO",
        "What Figure 6's MNIST rows are when learning rate, prior scale and annealing are those of the lowest "
        "validation −ELBO instead of the lowest NLL.",
        (_mnist(_family(), _ANNEALED),), ("neg_elbo", "nll", "accuracy", "parameters_k"), seeds=3,
        printed=(numbers.SHARED,), errata=(_ANNEALING, _WHICH_ANNEAL, _GRIDS), beyond=True,
    ),
    Experiment(
        "ktied/time", "Beyond: time", "Wall-clock time to a given −ELBO",
        "Which estimator (shared, flipout, local) reaches a given −ELBO on MNIST first, for mean field and 2-tied.",
        (_mnist(_estimators(), _PLAIN),), ("seconds", "step_ms", "neg_elbo"), seeds=3, beyond=True,
    ),
    Experiment(
        "ktied/compress", "Beyond: compress", "Nonnegative factors beside the clipped SVD",
        "Whether U Vᵀ with nonnegative factors (sb.compress) approximates a trained σ better than the SVD whose "
        "negative entries are set to 0.",
        (_mnist(_mean_field(), _PLAIN), _cifar100(_mean_field(), _PLAIN)), ("neg_elbo", "nll", "accuracy"), seeds=3,
        printed=numbers.TABLE2[:2],
        errata=("The printed numbers are Table 2's, of the clipped SVD.", _GRIDS), beyond=True,
    ),
    Experiment(
        "ktied/tuning", "Beyond: tuning", "Learning rates, prior scales and annealing from the paper's grids",
        "Which hyper-parameters of the paper's grids, or of a part of them, win on validation data; the paper does not "
        "print them.",
        (_mnist(_family(), _ANNEALED), _cifar100(_family(), _ANNEALED)), ("neg_elbo", "nll", "accuracy"),
        errata=(_GRIDS,), beyond=True,
    ),
)  # fmt: skip
ENTRIES: tuple[Experiment, ...] = (*_POSTHOC, *_TIED, *_BEYOND)

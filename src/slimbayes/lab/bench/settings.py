"""What is measured, as data: contenders, networks, phases, modes and targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from slimbayes import models

REFERENCE = "deterministic"
PHASES = {
    "train": "one training step: gradients to None, the loss (for Bayesian networks the ELBO, KL included), "
    "backward, optimizer",
    "predict": "`sb.predict(...).mean` against the deterministic network's softmax, per row",
    "small": "prediction with 10 samples per component for 16 examples, against as many deterministic passes of 16 as "
    "there are draws",
    "head": "only the last layer is Bayesian: prediction with 100 draws (samples × components), against one "
    "deterministic pass of the same examples",
    "many": "prediction with 200 draws in passes of as many rows as there are examples, against 200 deterministic "
    "passes of the same examples; of a compiled prediction the network alone is compiled",
}
MODES = {
    "eager": "as written",
    "compiled": "`torch.compile(fullgraph=True)` of one function from inputs to loss or probabilities",
    "graphs": 'the same with `mode="reduce-overhead"`: CUDA graphs',
}


@dataclass(frozen=True)
class Contender:
    """A method with its estimator and noise, or the package of a peer and our counterpart of it."""

    name: str
    title: str
    method: str = ""
    noise: str = "example"
    package: str = ""
    counterpart: str = ""


CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender("batchensemble", "BatchEnsemble, K=4", "BatchEnsemble(components=4)"),
        Contender("rank1", "Rank1 normal, K=4, per example", "Rank1.paper(components=4)"),
        Contender(
            "rank1-cauchy", "Rank1 Cauchy, K=4, per example", "Rank1.paper(components=4, posterior='cauchy')"
        ),
        Contender("rank1-shared", "Rank1 normal, K=4, shared noise", "Rank1.paper(components=4)", "shared"),
        Contender("meanfield-shared", "MeanField, shared sample", "MeanField.paper()"),
        Contender("meanfield-flipout", "MeanField, flipout", "MeanField.paper(estimator='flipout')"),
        Contender("meanfield-local", "MeanField, local", "MeanField.paper(estimator='local')"),
        Contender("ktied-shared", "KTied k=2, shared sample", "KTied.paper(rank=2)"),
        Contender("ktied-local", "KTied k=2, local", "KTied.paper(rank=2, estimator='local')"),
        Contender("emp", "EMP, K=5", "EMP.paper(components=5)"),
        Contender("ecmp", "ECMP, K=5", "ECMP.paper(components=5)"),
        Contender("mcdropout", "MCDropout", "MCDropout(rate=0.1)"),
        Contender("dropconnect", "DropConnect", "DropConnect(rate=0.1)"),
        Contender("deepensemble", "DeepEnsemble, 4 members", "DeepEnsemble(members=4)"),
    )
}
PEERS = {
    peer.name: peer
    for peer in (
        Contender(
            "bayesian-torch",
            "bayesian-torch, reparameterization",
            package="bayesian_torch",
            counterpart="meanfield-shared",
        ),
        Contender(
            "bayesian-torch-flipout",
            "bayesian-torch, flipout",
            package="bayesian_torch",
            counterpart="meanfield-flipout",
        ),
        Contender("torchbnn", "torchbnn", package="torchbnn", counterpart="meanfield-shared"),
        Contender("blitz", "BLiTZ", package="blitz", counterpart="meanfield-shared"),
        Contender(
            "torch-uncertainty",
            "torch-uncertainty, Bayesian",
            package="torch_uncertainty",
            counterpart="meanfield-shared",
        ),
        Contender(
            "torch-uncertainty-batchensemble",
            "torch-uncertainty, BatchEnsemble K=4",
            package="torch_uncertainty",
            counterpart="batchensemble",
        ),
    )
}
MANY = ("emp", "ecmp")
# No compiler takes recurrent layers, and they have no local estimator.
SEQUENCES = tuple(name for name in CONTENDERS if not name.endswith("local"))
HEADS = ("rank1", "rank1-shared", "meanfield-shared", "meanfield-local", "ktied-shared", "ktied-local")


@dataclass(frozen=True)
class Network:
    """A network, its inputs, the rows of one step, and where it is measured by default.

    ``samples`` of a prediction are per component; it has ``predict_rows`` where those of a step are too few to be
    split among them. Inputs are ``words``, so many, or else numbers. ``methods`` and ``modes`` name what the network
    can do, where that is not everything. ``adam`` says which optimizer a GPU step has: Adam, or SGD with
    momentum; on the CPU it is always Adam.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    rows: int
    samples: int = 4
    phases: tuple[str, ...] = ("train", "predict")
    devices: tuple[str, ...] = ("cpu", "cuda")
    adam: bool = False
    peers: bool = False
    head: str = ""
    words: int = 0
    predict_rows: int = 0
    methods: tuple[str, ...] = tuple(CONTENDERS)
    modes: tuple[str, ...] = tuple(MODES)


NETWORKS = {
    network.name: network
    for network in (
        Network(
            "mlp",
            "MLP 784-400-400-10, 1,024 rows",
            models.MLP,
            (784,),
            10,
            1024,
            adam=True,
            peers=True,
        ),
        Network(
            "lenet",
            "LeNet of the k-tied paper, 32×32, 256 rows",
            lambda: models.LeNet(classes=10),
            (3, 32, 32),
            10,
            256,
            phases=("train", "predict", "small"),
            peers=True,
        ),
        Network(
            "wrn-16-2",
            "WRN-16-2, 32×32, 256 rows",
            lambda: models.WideResNet(16, 2),
            (3, 32, 32),
            10,
            256,
            peers=True,
        ),
        Network(
            "wrn-16-4",
            "WRN-16-4, 32×32, 512 rows",
            lambda: models.WideResNet(16, 4),
            (3, 32, 32),
            10,
            512,
        ),
        Network(
            "wrn-28-4",
            "WRN-28-4, 32×32, 512 rows",
            lambda: models.WideResNet(28, 4, 100),
            (3, 32, 32),
            100,
            512,
            phases=("many",),
            devices=("cuda",),
        ),
        Network(
            "lstm",
            "LSTM of the k-tied paper, 80 words, 128 rows",
            lambda: models.TextLSTM(outputs=2),
            (80,),
            2,
            128,
            samples=10,
            predict_rows=1280,
            devices=("cpu",),
            words=20_000,
            methods=SEQUENCES,
            modes=("eager",),
        ),
        Network(
            "resnet-18",
            "ResNet-18, 224×224, 16 images",
            models.resnet18,
            (3, 224, 224),
            1000,
            16,
            phases=("head",),
            head="fc",
        ),
        Network(
            "wrn-28-10",
            "WRN-28-10, 32×32, 512 rows",
            models.wrn28_10,
            (3, 32, 32),
            10,
            512,
            devices=("cuda",),
        ),
        Network(
            "resnet-50",
            "ResNet-50, 224×224, 128 rows",
            models.resnet50,
            (3, 224, 224),
            1000,
            128,
            devices=("cuda",),
        ),
        Network(
            "vit-b",
            "ViT-B/16, 224×224, 128 rows",
            models.VisionTransformer,
            (3, 224, 224),
            1000,
            128,
            devices=("cuda",),
            adam=True,
        ),
        Network(
            "mlp-4096",
            "MLP, four layers of 4,096, 4,096 rows",
            lambda: models.MLP((4096,) * 5),
            (4096,),
            4096,
            4096,
            devices=("cuda",),
            adam=True,
        ),
        # For trials and tests; measured only when named.
        Network("tiny", "MLP 8-16-3, 64 rows", lambda: models.MLP((8, 16, 3)), (8,), 3, 64, devices=()),
        Network(
            "tiny-conv",
            "WRN-10-1, 8×8, 32 rows",
            lambda: models.WideResNet(10, 1, 3),
            (3, 8, 8),
            3,
            32,
            phases=("train", "predict", "small", "head", "many"),
            devices=(),
            head="output",
        ),
        Network(
            "tiny-lstm",
            "LSTM 4-4, 5 words, 16 rows",
            lambda: models.TextLSTM(20, 4, 4, 2),
            (5,),
            2,
            16,
            predict_rows=64,
            devices=(),
            words=20,
            methods=SEQUENCES,
            modes=("eager",),
        ),
    )
}


@dataclass(frozen=True)
class BenchConfig:
    """What one call measures, and how.

    ``rounds`` are good rounds wanted per contender; ``seconds`` the least time one timing lasts; ``peers`` the Python
    of the peers' environment; ``budget`` the seconds after which the run stops cleanly, to be continued; ``beside``
    gives every contender a process of its own, which compiles while the others do.

    >>> BenchConfig(networks=("mlp",)).networks
    ('mlp',)
    """

    networks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("eager", "compiled")
    rounds: int = 15
    seconds: float = 0.05
    device: str = "cpu"
    threads: int = 2
    peers: str | None = None
    budget: float | None = None
    beside: bool = False


@dataclass(frozen=True)
class Target:
    """A bound on a ratio: of time, of peak memory, or of the first compiled step."""

    device: str
    networks: tuple[str, ...]
    phase: str
    mode: str
    methods: tuple[str, ...]
    limit: float
    quantity: str = "time"


_MLP, _WIDE, _BIG = ("mlp",), ("wrn-16-2",), ("wrn-28-10", "resnet-50")
_ALL = tuple(name for name, network in NETWORKS.items() if network.devices and name != "lstm")
_LSTM, _SAMPLED = ("lstm",), ("ktied-shared", "meanfield-shared")
TARGETS = (
    Target("cpu", _LSTM, "train", "eager", _SAMPLED, 1.12),
    Target("cpu", _LSTM, "train", "eager", ("rank1-shared",), 1.2),
    Target("cpu", _LSTM, "train", "eager", ("rank1", "rank1-cauchy"), 2.0),
    Target("cpu", _LSTM, "predict", "eager", (*_SAMPLED, "rank1-shared"), 1.1),
    Target("cpu", _LSTM, "predict", "eager", ("rank1", "rank1-cauchy"), 2.0),
    Target("cpu", _MLP, "train", "eager", ("ktied-shared", "meanfield-shared"), 1.20),
    Target("cpu", _MLP, "train", "compiled", ("ktied-shared", "meanfield-shared"), 1.12),
    Target("cpu", _MLP, "train", "eager", ("rank1-shared",), 1.25),
    Target("cpu", _MLP, "train", "compiled", ("rank1-shared",), 1.15),
    Target("cpu", _MLP, "train", "eager", ("rank1",), 1.9),
    Target("cpu", _MLP, "train", "compiled", ("rank1",), 1.6),
    Target("cpu", _WIDE, "train", "eager", ("rank1",), 1.10),
    Target("cpu", _ALL, "predict", "eager", tuple(CONTENDERS), 1.05),
    Target("cpu", ("lenet",), "small", "eager", ("rank1",), 1.3),
    Target("cpu", ("lenet",), "small", "eager", ("ktied-local",), 1.5),
    Target("cpu", ("resnet-18",), "head", "eager", HEADS, 1.2),
    Target("cuda", _BIG, "train", "graphs", ("batchensemble",), 1.03),
    Target("cuda", _BIG, "train", "graphs", ("rank1", "rank1-cauchy", "emp", "ecmp"), 1.05),
    Target("cuda", ("mlp-4096",), "train", "graphs", ("ktied-shared", "ktied-local"), 1.10),
    Target("cuda", ("mlp-4096", *_BIG), "train", "graphs", ("meanfield-flipout",), 2.1),
    Target("cuda", _BIG, "train", "eager", ("rank1", "rank1-cauchy"), 1.25),
    Target("cuda", _BIG, "train", "compiled", ("rank1", "rank1-cauchy"), 1.10, "memory"),
    Target("cuda", ("mlp-4096",), "train", "compiled", ("ktied-shared", "ktied-local"), 1.15, "memory"),
    Target("cuda", ("wrn-28-10",), "train", "compiled", ("rank1", "rank1-cauchy"), 1.3, "first"),
    Target("cuda", _ALL, "predict", "compiled", tuple(CONTENDERS), 1.05),
    Target("cuda", ("lenet",), "small", "compiled", ("rank1",), 1.3),
    Target("cuda", ("lenet",), "small", "compiled", ("ktied-local",), 1.5),
    Target("cuda", ("resnet-18",), "head", "eager", HEADS, 1.2),
    Target("cuda", ("wrn-28-4",), "many", "eager", MANY, 1.05),
    Target("cuda", ("wrn-28-4",), "many", "compiled", MANY, 1.05),
    Target("cuda", ("wrn-28-4",), "many", "graphs", MANY, 1.05),
    Target("cuda", ("wrn-28-4",), "many", "eager", MANY, 1.05, "memory"),
)


def limit(device: str, network: str, phase: str, mode: str, method: str, quantity: str) -> float | None:
    """The bound on a ratio, or None where there is none.

    >>> limit("cpu", "mlp", "train", "eager", "rank1", "time")
    1.9
    """
    for target in TARGETS:
        if (
            (target.device, target.phase, target.mode, target.quantity) == (device, phase, mode, quantity)
            and network in target.networks
            and method in target.methods
        ):
            return target.limit
    return None

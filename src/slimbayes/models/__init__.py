"""Plain torch networks of the three papers; nothing Bayesian in here."""

from .lenet import LeNet
from .mlp import MLP, DeepMLP, RegressionNet
from .pyramidnet import PyramidNet
from .resnet import ResNet, resnet18, resnet50
from .tfp_resnet import TFPResNet
from .wrn import WideResNet, wrn28_10

__all__ = [
    "MLP",
    "DeepMLP",
    "LeNet",
    "PyramidNet",
    "RegressionNet",
    "ResNet",
    "TFPResNet",
    "WideResNet",
    "resnet18",
    "resnet50",
    "wrn28_10",
]

"""Plain torch networks of the three papers, and a vision transformer; nothing Bayesian in here."""

from .build import NETWORKS, DenseNet, build, default_network
from .lenet import LeNet
from .mlp import MLP, DeepMLP, RegressionNet
from .pyramidnet import PyramidNet
from .resnet import ResNet, resnet18, resnet50
from .text import TextLSTM
from .tfp_resnet import TFPResNet
from .vit import VisionTransformer
from .wrn import WideResNet, wrn28_10

__all__ = [
    "MLP",
    "NETWORKS",
    "DeepMLP",
    "DenseNet",
    "LeNet",
    "PyramidNet",
    "RegressionNet",
    "ResNet",
    "TFPResNet",
    "TextLSTM",
    "VisionTransformer",
    "WideResNet",
    "build",
    "default_network",
    "resnet18",
    "resnet50",
    "wrn28_10",
]

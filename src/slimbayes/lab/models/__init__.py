"""Plain torch networks of the three papers, and a vision transformer; nothing Bayesian in here."""

from slimbayes.lab.models.build import NETWORKS, DenseNet, build, default_network
from slimbayes.lab.models.lenet import LeNet
from slimbayes.lab.models.pyramidnet import PyramidNet
from slimbayes.lab.models.record_net import RecordNet
from slimbayes.lab.models.resnet import ResNet, resnet18, resnet50
from slimbayes.lab.models.text_lstm import TextLSTM
from slimbayes.lab.models.tfp_resnet import TFPResNet
from slimbayes.lab.models.vit import VisionTransformer
from slimbayes.lab.models.wrn import WideResNet, wrn28_10
from slimbayes.networks.dense import MLP, DeepMLP, RegressionNet

__all__ = [
    "MLP",
    "NETWORKS",
    "DeepMLP",
    "DenseNet",
    "LeNet",
    "PyramidNet",
    "RecordNet",
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

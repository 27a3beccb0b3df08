"""Fully connected networks: the k-tied paper's MNIST MLP, the EMP paper's deep MLP and regression net."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.networks.initialization import he_initialize


class MLP(nn.Module):
    """Dense layers with an activation between them; inputs of more than two dimensions are flattened.

    The default 784-400-400-10 is the MNIST network of Swiatkowski et al. (2020),
    https://arxiv.org/abs/2002.02655: 478,410 parameters, doubled to 956,820 by mean field.
    ``normalization=True`` adds a BatchNorm between each hidden layer and its activation.
    he_normal kernels, zero biases.

    >>> import torch
    >>> network = MLP()
    >>> sum(p.numel() for p in network.parameters())
    478410
    >>> network(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        sizes: Sequence[int] = (784, 400, 400, 10),
        activation: Callable[[], nn.Module] = nn.ReLU,
        normalization: bool = False,
        output_bias: bool = True,
    ) -> None:
        super().__init__()
        if len(sizes) < 2:
            raise ValueError(f"sizes={tuple(sizes)} needs an input and an output size, as in (784, 400, 10)")
        hidden = sizes[1:-1]
        self.hidden = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes[:-1]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(n) if normalization else nn.Identity() for n in hidden)
        self.activations = nn.ModuleList(activation() for _ in hidden)
        self.output = nn.Linear(sizes[-2], sizes[-1], bias=output_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new he_normal kernels; biases go to zero, norms to identity."""
        he_initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, ...] with sizes[0] numbers per row to [B, sizes[-1]]."""
        if x.dim() > 2:
            x = x.flatten(1)  # [B, sizes[0]]
        for linear, norm, activation in zip(self.hidden, self.norms, self.activations, strict=True):
            x = activation(norm(linear(x)))
        outputs: Tensor = self.output(x)
        return outputs


class DeepMLP(MLP):
    """The L-layer MLP of width H in Table 3 of Chang et al. (2019), https://arxiv.org/abs/1905.09453.

    Hidden biases but no output bias: (L - 1)(H^2 + H) + H^2 parameters, 1,009,900 for L = H = 100.
    The paper's count leaves the norms out of the network yet patches them; ``normalization=True``
    adds those 99 norms.

    >>> sum(p.numel() for p in DeepMLP(layers=100, width=100).parameters())
    1009900
    """

    def __init__(self, layers: int = 100, width: int = 100, normalization: bool = False) -> None:
        super().__init__((width,) * (layers + 1), normalization=normalization, output_bias=False)


class RegressionNet(nn.Module):
    """The one-hidden-layer ReLU net of the EMP paper's regressions (Chang et al., 2019).

    50 hidden units (100 for Protein and Year); a BatchNorm after the input and one after the hidden
    layer's ReLU, where its dropout baseline drops; gamma starts at 0.2. ``normalization="none"`` is
    the network of the explicit ensemble.

    >>> import torch
    >>> network = RegressionNet(inputs=13)
    >>> network(torch.zeros(5, 13)).shape
    torch.Size([5, 1])
    >>> network.hidden_norm.weight[:3].detach()
    tensor([0.2000, 0.2000, 0.2000])
    """

    def __init__(
        self,
        inputs: int,
        outputs: int = 1,
        hidden: int = 50,
        normalization: Literal["batch", "none"] = "batch",
    ) -> None:
        super().__init__()
        if normalization not in ("batch", "none"):
            raise ValueError(f"normalization={normalization!r} is unknown; use 'batch' or 'none'")
        batch = normalization == "batch"
        self.input_norm = nn.BatchNorm1d(inputs) if batch else nn.Identity()
        self.hidden = nn.Linear(inputs, hidden)
        self.hidden_norm = nn.BatchNorm1d(hidden) if batch else nn.Identity()
        self.output = nn.Linear(hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new he_normal kernels and set gamma to 0.2."""
        he_initialize(self)
        for norm in (self.input_norm, self.hidden_norm):
            if isinstance(norm, nn.BatchNorm1d):
                nn.init.constant_(norm.weight, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Map features [B, inputs] to targets [B, outputs]."""
        x = self.hidden_norm(F.relu(self.hidden(self.input_norm(x))))
        targets: Tensor = self.output(x)
        return targets

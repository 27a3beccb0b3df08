"""LSTM layers as Keras starts them."""

import torch
from torch import nn


@torch.no_grad()
def keras_initialize(lstm: nn.LSTM, single_bias: bool = True) -> None:
    """Re-initialise an LSTM in place: Glorot-uniform kernels, orthogonal recurrent ones, forget bias 1, else 0.

    Glorot's bound √(6 / (inputs + 4·hidden)) is over the four gates at once, as Keras has them in one matrix; the
    recurrent kernel's transpose has orthonormal columns, as there. torch has two biases of which only the sum counts:
    with ``single_bias`` that of the recurrent product is 0 and is not trained.

    >>> lstm = nn.LSTM(3, 4)
    >>> keras_initialize(lstm)
    >>> lstm.bias_ih_l0[4:8].tolist(), lstm.bias_hh_l0.requires_grad
    ([1.0, 1.0, 1.0, 1.0], False)
    """
    for name, parameter in lstm.named_parameters():
        if name.startswith("weight_ih"):
            nn.init.xavier_uniform_(parameter)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(parameter)
        else:
            parameter.zero_()
            if name.startswith("bias_ih"):  # gates i, f, g, o
                parameter[lstm.hidden_size : 2 * lstm.hidden_size] = 1.0
            else:
                parameter.requires_grad_(not single_bias)

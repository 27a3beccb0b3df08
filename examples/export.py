"""From training to serving: eight fixed draws in one ONNX file, run without PyTorch's modules, with its uncertainty."""

import os
import tempfile

import torch
from torch import nn

import slimbayes as sb


def main(steps: int = 200) -> dict[str, float]:
    torch.manual_seed(0)
    y = torch.randint(3, (600,))
    x = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])[y] + 0.5 * torch.randn(600, 2)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    model = sb.bayesianize(net, sb.Rank1(components=4))
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=1e-4))
    for _ in range(steps):
        optimizer.zero_grad()
        sb.elbo(sb.draw(model, x), y, model, num_data=len(x)).loss.backward()
        optimizer.step()
    frozen = sb.freeze(model, draws=8, example=x[:4])  # [8, batch, 3], the same in every call
    path = sb.export.to_onnx(
        frozen, x[:4], os.path.join(tempfile.mkdtemp(), "model.onnx"), {"classes": "abc"}
    )
    served = sb.export.OnnxModel(path)  # onnxruntime; or any other runtime, in any language
    here, there, middle = (sb.Categorical().predictive(f) for f in (frozen(x), served(x), served(0.1 * x)))
    difference = (here.mean - there.mean).abs().max().item()
    accuracy = (there.mean.argmax(-1) == y).float().mean().item()
    clear, between = (p.entropy.mean().item() for p in (there, middle))
    print(f"{served.metadata['draws']} draws; entropy {clear:.3f} in a class, {between:.3f} between")
    return {"difference": difference, "accuracy": accuracy, "clear": clear, "between": between}


if __name__ == "__main__":
    main()

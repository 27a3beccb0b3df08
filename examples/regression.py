"""Error bars on a cubic: how often the 90 % interval holds the truth, and what widens it."""

import torch
from torch import nn

import slimbayes as sb


def cubic(n: int, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    x = low + (high - low) * torch.rand(n, 1)
    return x, 0.1 * x**3 + 0.3 * torch.randn(n, 1)


def main(steps: int = 1000) -> dict[str, float]:
    torch.manual_seed(0)
    x, y = cubic(500, -3.0, 3.0)
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 1))
    model = sb.bayesianize(net, sb.MeanField(estimator="local"))
    likelihood = sb.Gaussian(learn="global")  # one noise level, that of the residuals
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=0.0))
    annealing = sb.LinearAnnealing(steps // 2)
    for step in range(steps):
        draws = sb.draw(model, x)
        weight = annealing(step)
        loss = sb.elbo(draws, y, model, num_data=len(x), likelihood=likelihood, kl_weight=weight).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x_test, y_test = cubic(2000, -3.0, 3.0)
    inside = sb.predict(model, x_test, samples=50, noise="shared", seed=0, likelihood=likelihood)
    outside = sb.predict(model, x_test + 8.0, samples=50, noise="shared", seed=0, likelihood=likelihood)
    lower, upper = inside.interval(0.9)
    coverage = ((lower <= y_test) & (y_test <= upper)).float().mean().item()
    noise = likelihood.log_precision.exp().rsqrt().item()
    spread = [p.epistemic.mean().sqrt().item() for p in (inside, outside)]
    print(f"the 90 % interval holds {100 * coverage:.1f} % of new points; noise {noise:.3f} (truth 0.3)")
    print(f"epistemic deviation {spread[0]:.3f} among the data, {spread[1]:.3f} eight units to their right")
    return {"coverage": coverage, "noise": noise, "inside": spread[0], "outside": spread[1]}


if __name__ == "__main__":
    main()

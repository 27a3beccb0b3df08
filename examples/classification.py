"""Your own training loop, and a network that knows where it has seen no data: two moons."""

import torch
from torch import nn

import slimbayes as sb


def moons(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle, y = torch.pi * torch.rand(n), torch.randint(2, (n,))
    side = 1.0 - 2.0 * y  # +1 for the upper moon, −1 for the lower
    x = torch.stack((side * angle.cos() + y, side * angle.sin() + 0.5 * y), dim=1)
    return x + 0.1 * torch.randn(n, 2), y


def main(steps: int = 600) -> dict[str, float]:
    torch.manual_seed(0)
    x, y = moons(400)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    model = sb.bayesianize(net, sb.MeanField(estimator="local"))
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=0.0))
    annealing = sb.LinearAnnealing(steps)
    for step in range(steps):
        rows = torch.randint(len(x), (100,))
        draws = sb.draw(model, x[rows])  # [1, 100, 2]
        loss = sb.elbo(draws, y[rows], model, num_data=len(x), kl_weight=annealing(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x_test, y_test = moons(1000)
    near = sb.predict(model, x_test, samples=64, noise="shared", seed=0)
    far = sb.predict(model, x_test + 6.0, samples=64, noise="shared", seed=0)
    accuracy = (near.mean.argmax(-1) == y_test).float().mean().item()
    information = [p.mutual_information.mean().item() for p in (near, far)]
    print(f"accuracy {accuracy:.3f}; disagreement of the draws: {information[0]:.3f} nats near the data,")
    print(f"{information[1]:.3f} nats six units away from it")
    return {"accuracy": accuracy, "near": information[0], "far": information[1]}


if __name__ == "__main__":
    main()

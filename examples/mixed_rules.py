"""One network, three methods: EMP on the norms, rank-1 factors on the convolutions, k-tied on the head."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import slimbayes as sb


def main(steps: int = 200) -> dict[str, float]:
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.as_tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0  # [1797, 1, 8, 8]
    y = torch.as_tensor(digits.target)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(288, 10),
    )  # fmt: skip
    rules = [
        (nn.Conv2d, sb.Rank1(components=4)),
        (nn.Linear, sb.KTied(rank=2)),
        (None, sb.EMP(components=4, patch=("norm",))),  # None: what the method itself selects
    ]
    model = sb.bayesianize(net, rules)
    print(sb.summary(model))
    optimizer = torch.optim.AdamW(sb.parameter_groups(model, lr=1e-2, weight_decay=1e-2))
    annealing = sb.LinearAnnealing(10 * steps)  # a short run: the KL stays light
    for step in range(steps):
        rows = torch.randint(1500, (32,))
        loss = sb.elbo(sb.draw(model, x[rows]), y[rows], model, 1500, kl_weight=annealing(step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    prediction = sb.predict(model, x[1500:], samples=8, seed=0)
    accuracy = (prediction.mean.argmax(-1) == y[1500:]).float().mean().item()
    print(f"accuracy {accuracy:.3f} from {len(prediction.draws)} draws")
    return {"accuracy": accuracy, "draws": len(prediction.draws), "overhead": sb.summary(model).overhead}


if __name__ == "__main__":
    main()

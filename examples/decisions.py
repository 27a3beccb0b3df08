"""From probabilities to decisions on digits: temperature, conformal sets, abstention, costs, a look at the model."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import slimbayes as sb


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    x, y = (torch.as_tensor(each) for each in load_digits(return_X_y=True))
    order = torch.randperm(len(x))
    x, y = x[order].float() / 16 + 0.3 * torch.randn(len(x), 64), y[order]  # bad scans
    train, held, test = slice(700), slice(700, 1250), slice(1250, None)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model = sb.bayesianize(net, sb.BatchEnsemble(components=4, random_sign_init=0.5))
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=0.0))
    for _ in range(steps):
        loss = sb.elbo(sb.draw(model, x[train]), y[train], model, num_data=700).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(sb.diagnose(model, x[held], y[held], num_data=700))
    calibration, new = sb.predict(model, x[held]), sb.predict(model, x[test])
    temperature = sb.decisions.Temperature().fit(calibration, y[held])
    before, after = (float(-p.log_prob(y[test]).mean()) for p in (new, temperature(new)))
    print(f"temperature {temperature.value:.2f}: NLL {before:.3f} before, {after:.3f} after")
    calibration, new = temperature(calibration), temperature(new)
    sets = sb.decisions.ConformalSets("raps", alpha=0.05).fit(calibration, y[held], seed=0)(new, seed=0)
    covered, size = sb.decisions.set_coverage(sets, y[test]), sb.decisions.set_size(sets)
    print(f"sets of {size:.2f} digits on average hold the right one in {100 * covered:.1f} % of cases")
    rule = sb.decisions.Abstention.for_risk(calibration, y[held], risk=0.05)
    answered = ~rule.abstains(new)
    risk = float((rule(new) != y[test])[answered].float().mean())
    print(f"answers {100 * answered.float().mean():.0f} % of cases, of which {100 * risk:.1f} % wrongly")
    costs = 1 - torch.eye(10)
    costs[0, 1:] = 10.0  # to take a 0 for something else costs ten times as much
    action, cost = sb.decisions.least_cost(new, costs, abstain=0.3)
    print(f"decides {100 * (action >= 0).float().mean():.0f} % at an expected cost of {cost.mean():.3f} each")
    return {"before": before, "after": after, "covered": covered, "risk": risk, "cost": float(cost.mean())}


if __name__ == "__main__":
    main()

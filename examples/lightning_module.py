"""Lightning trains a rank-1 network on two moons: KL annealing, calibrated metrics, predictions of all members."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import make_moons
from torch.utils.data import DataLoader, TensorDataset, random_split

import slimbayes as sb
from slimbayes.integrations.lightning import BayesianModule, KLAnnealing


def main(epochs: int = 30) -> dict[str, float]:
    pl.seed_everything(0, verbose=False)
    points, labels = make_moons(1200, noise=0.15, random_state=0)
    data = TensorDataset(torch.tensor(points, dtype=torch.float32), torch.tensor(labels))
    some, others = random_split(data, [1000, 200])
    train, test = DataLoader(some, batch_size=64, shuffle=True), DataLoader(others, batch_size=100)
    net = torch.nn.Sequential(torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    module = BayesianModule(sb.bayesianize(net, sb.Rank1(components=4)), lr=1e-2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(max_epochs=epochs, accelerator="cpu", callbacks=[KLAnnealing(0.5)], **quiet)
    trainer.fit(module, train)
    (metrics,) = trainer.test(module, test, verbose=False)
    prediction = sb.Predictive.cat(trainer.predict(module, test))
    print({name: round(value, 3) for name, value in metrics.items()}, prediction)
    return {**metrics, "draws": len(prediction.draws)}


if __name__ == "__main__":
    main()

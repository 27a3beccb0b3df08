"""A CSV file of one's own: train, save as a run, and predict new rows with intervals."""

import tempfile
from pathlib import Path

import torch

from slimbayes.lab.config import RunConfig
from slimbayes.lab.data import load, read_inputs
from slimbayes.lab.predictions import predict_table, write_table
from slimbayes.lab.runs import load_run, train_run
from slimbayes.training import Training


def main(epochs: int = 60) -> dict[str, list]:
    folder = Path(tempfile.mkdtemp())
    x = torch.rand(300, 2, generator=torch.Generator().manual_seed(0)) * 4 - 2
    y = (x[:, 0] ** 2 + x[:, 1]).tolist()
    lines = [f"{a:.5f},{b:.5f},{c:.5f}" for (a, b), c in zip(x.tolist(), y, strict=True)]
    (folder / "measured.csv").write_text("\n".join(["dose,age,response", *lines]))
    (folder / "new.csv").write_text("age,dose\n0.5,1.0\n0.5,9.0\n")  # the second dose was never seen

    training = Training(epochs=epochs, lr=1e-2, batch_size=32)
    method = "Rank1(components=4, prior=Normal(1, 0.5))"  # of 300 rows the default's 0.1 makes one component of four
    config = RunConfig(str(folder / "measured.csv"), {"target": "response"}, method=method, training=training)
    data = load(config.data, **config.data_options)
    train_run(config, folder / "run", progress=False, data=data)

    run = load_run(folder / "run")  # as another program would, later
    rows, _ = read_inputs(folder / "new.csv", run.facts.to_dict())
    table = predict_table(run, rows, level=0.9)
    write_table(table, folder / "predictions.csv")
    print((folder / "predictions.csv").read_text())
    return table


if __name__ == "__main__":
    main()

"""Train a small network several ways on one or two processes and write what each saw; run by test_training_ddp.py."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

import slimbayes as sb
from slimbayes.training import StopTraining, Training, make_fabric
from slimbayes.training.keeping import STATE
from slimbayes.training.state import read_state
from slimbayes.verbs.method_text import parse_method

CASES = {
    "rank1": ("Rank1(components=2)", "mean"),
    "ktied": ("KTied(rank=1)", "mean"),
    "noisy": ("Rank1(components=2)", "example"),
    "silent": ("Rank1(components=2)", "mean"),
}


def train(name: str, devices: int, fabric, folder: Path) -> dict:
    method, noise = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    y = (x[:, 0] + 0.3 * x[:, 1] > 0).long()
    if name in ("noisy", "silent"):
        x = torch.ones(96, 4)  # every row alike: what differs between processes is noise
    network = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
    model = sb.bayesianize(network, parse_method(method))
    settings = Training(
        epochs=4, batch_size=24, lr=0.05, noise=noise, devices=devices, accelerator="cpu", log_every=1
    )
    samples: list[list[float]] = []

    def keep(module, inputs, output):
        if torch.is_grad_enabled():  # neither validation nor the check of the rows
            samples.append(output[0].tolist())

    inner = model[0].register_forward_hook(keep)
    result = sb.fit(model, (x, y), settings, fabric=fabric, progress=False, folder=folder, validation=(x, y))
    inner.remove()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    kl = sb.kl(model).item()
    return {"history": result.history, "weights": weights, "samples": samples[:16], "kl": kl}


def stopped(devices: int, fabric, folder: Path) -> list[int]:
    """Steps after a run that its callback stopped, and after the one that went on: in every process."""
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    model = sb.bayesianize(torch.nn.Linear(4, 2), sb.Rank1(components=2))
    settings = Training(epochs=4, batch_size=24, devices=devices, accelerator="cpu", log_every=1)
    options = {"fabric": fabric, "progress": False, "folder": folder}

    def stop(step: int, row: dict) -> None:  # called in the first process alone
        if step == 6:
            raise StopTraining("enough")

    try:
        sb.fit(model, (x, (x[:, 0] > 0).long()), settings, callback=stop, **options)
        return []
    except StopTraining:
        fabric.barrier()
        state = read_state(folder / STATE)[1]["step"]
    result = sb.fit(model, (x, (x[:, 0] > 0).long()), settings, resume=True, **options)
    return [state, result.step]


def not_finite(devices: int, fabric) -> dict:
    """A loss that is infinite in one process alone, with finite gradients: what each process does with the step."""
    torch.manual_seed(0)
    x = torch.randn(96, 4)
    found = {}
    for how in ("stop", "skip"):
        torch.manual_seed(0)
        model = sb.bayesianize(torch.nn.Linear(4, 1), sb.Rank1(components=2))
        calls = []

        class Trap(sb.Gaussian):
            def mean_nll(self, draws, targets, calls=calls):
                calls.append(1)
                value = super().mean_nll(draws, targets)
                bad = len(calls) in (3, 4) and fabric.global_rank == fabric.world_size - 1
                return value + (torch.tensor(float("inf")) if bad else 0.0)

        options = {"lr": 0.01, "devices": devices, "accelerator": "cpu", "batch_size": 24, "progress": False}
        options |= {"fabric": fabric, "likelihood": Trap(), "on_nonfinite": how}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = sb.fit(model, (x, x[:, :1]), steps=6, **options)
            said = f"skipped {result.skipped}"
        except sb.TrainingError as error:
            said = str(error)
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[how] = {"said": said, "weights": weights.tolist()}
    return found


def main(devices: int, out: str) -> None:
    torch.set_num_threads(1)
    fabric = make_fabric(Training(devices=devices, accelerator="cpu"))
    fabric.launch()
    found = {"rank": fabric.global_rank, "world": fabric.world_size, "process": os.getpid()}
    for name in CASES:
        found[name] = train(name, devices, fabric, Path(out) / f"{name}-{devices}")
    found["not finite"] = not_finite(devices, fabric)
    found["stopped"] = stopped(devices, fabric, Path(out) / f"stopped-{devices}")
    (Path(out) / f"{devices}-{fabric.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
    # Everything is written. Now and then a thread of gloo's aborts a process that is torn down under load, which says
    # nothing of what was measured.
    torch.distributed.barrier()
    os._exit(0)

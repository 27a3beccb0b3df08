"""Networks whose parameters two processes share out, against the same in one; run by test_sharded_weights.py."""

import copy
import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import slimbayes as sb

METHODS = {
    "Rank1": sb.Rank1(components=2),
    "Rank1 mean": sb.Rank1(components=3, posterior="cauchy", kl_reduction="mean"),
    "Rank1 halfcauchy": sb.Rank1(components=2, posterior="halfcauchy"),
    "Rank1 steps": sb.Rank1(components=3, components_per_step=2),
    "BatchEnsemble": sb.BatchEnsemble(components=3),
    "MeanField": sb.MeanField(),
    "MeanField flipout": sb.MeanField(estimator="flipout"),
    "MeanField local": sb.MeanField.paper(estimator="local", tied_mean=True),
    "KTied": sb.KTied(),
    "KTied local": sb.KTied(rank=1, estimator="local", prior=sb.EmpiricalNormal(), temperature=0.3),
    "EMP": sb.EMP(
        components=3, patch=("norm", "output"), learn_mixing=True, prior_precision=1.0, init_noise=0.1
    ),
    "ECMP": sb.ECMP(components=3, patch=("norm", "output"), init_noise=0.1),
    "MCDropout": sb.MCDropout(0.2),
    "DropConnect": sb.DropConnect(0.2),
    "DeepEnsemble": sb.DeepEnsemble(members=3),
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.block(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.down(torch.relu(self.up(self.norm(self.table(x))))).mean(1))


def convolutions(norm):
    layers = [
        nn.Conv2d(3, 8, 3),
        norm,
        nn.ReLU(),
        nn.Conv2d(8, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers), torch.randn(8, 3, 6, 6)


def dense():
    layers = [nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers), torch.randn(8, 6)


NETWORKS = {
    "dense": dense,
    "batch norm": lambda: convolutions(nn.BatchNorm2d(8)),
    "group norm": lambda: convolutions(nn.GroupNorm(2, 8)),
    "attention": lambda: (Attention(), torch.randn(8, 4, 8)),
    "recurrent": lambda: (Recurrent(), torch.randn(8, 4, 5)),
}
WRAPPED = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.LSTM, nn.TransformerEncoderLayer)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(ours, theirs):
    """The largest difference of two lists of tensors, relative to the largest number of each, or of all by far."""
    assert [t is None for t in ours] == [t is None for t in theirs]
    pairs = [(whole(a.detach()), b.detach()) for a, b in zip(ours, theirs) if b is not None]  # noqa: B905
    least = 1e-2 * max(float(b.abs().max()) for _, b in pairs)
    return max(float((a - b).abs().max()) / max(float(b.abs().max()), least) for a, b in pairs)


def wrap(model):
    """Layer by layer, then the whole; a transformer's block as one, for it reads the weights of what is inside."""
    blocks = [m for m in model.modules() if isinstance(m, nn.TransformerEncoderLayer)]
    inside = {id(m) for block in blocks for m in block.modules() if m is not block}
    for module in [m for m in model.modules() if isinstance(m, WRAPPED) and id(m) not in inside]:
        fully_shard(module)
    return fully_shard(model)


def step(model, x, y, options, parts=1):
    """One step on the parts of a batch, whose gradients are averaged: the loss, the KL, the gradients."""
    optimizer = torch.optim.SGD(sb.parameter_groups(model, lr=0.1, weight_decay=1e-3), lr=0.1)
    losses = []
    for at, (own, targets) in enumerate(zip(x.chunk(parts), y.chunk(parts))):  # noqa: B905
        place = options.get("first_example", 0) + at * len(own)
        draws = sb.draw(model, own, samples=2, seed=3, first_example=place)
        result = sb.elbo(draws, targets, model, num_data=50)
        (result.loss / parts).backward()
        losses.append(result.loss.detach())
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    return torch.stack(losses).mean(), result.kl.detach(), gradients


def compare(model, single, x, y, rank, folder, fresh, shared_data):
    """How far a model of two processes is from one of one process, by what was asked of it."""
    # Statistics of a batch are those of the process that has it; a joint loss of the halves is that of the whole else.
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in single.modules())
    parts = 1 if shared_data or not normed else 2
    half = slice(None) if shared_data else slice(4 * rank, 4 * rank + 4)
    found = {}
    loss, kl, expected = step(single, x, y, {}, parts)
    own, own_kl, gradients = step(model, x[half], y[half], {"first_example": half.start or 0})
    dist.all_reduce(own)
    found["loss"] = float((own / 2 - loss).abs() / loss.abs())
    found["kl"] = float((own_kl - kl).abs() / kl.abs().clamp(min=1.0))
    found["gradients"] = apart(gradients, expected)
    found["weights"] = apart(list(model.parameters()), list(single.parameters()))
    before = sb.kl(single).detach()
    found["kl again"] = float((sb.kl(model).detach() - before).abs() / before.abs().clamp(min=1.0))
    for module, other in zip(model.modules(), single.modules()):  # noqa: B905
        for key, buffer in other._buffers.items():  # statistics are each process's own
            if buffer is not None:
                whole(module._buffers[key]).copy_(buffer)
    wanted = sb.predict(single, x, samples=2, seed=5).mean
    found["prediction"] = apart([sb.predict(model, x, samples=2, seed=5).mean], [wanted])
    found["parameters"] = abs(sb.summary(model).parameters - sb.summary(single).parameters)
    if fresh is None:
        return found
    sb.save(model, folder / "model.safetensors")
    again = sb.load(fresh, folder / "model.safetensors")
    found["loaded"] = apart([sb.predict(again, x, samples=2, seed=5).mean], [wanted])
    sb.load(model, folder / "model.safetensors")  # and back into the parts
    found["loaded in parts"] = apart([sb.predict(model, x, samples=2, seed=5).mean], [wanted])
    dist.barrier()
    return found


def fsdp(name, method, rank, folder):
    torch.manual_seed(0)
    network, x = NETWORKS[name]()
    fresh, y = copy.deepcopy(network) if name == "dense" else None, torch.randint(3, (8,))
    model = sb.bayesianize(network, METHODS[method])
    single = copy.deepcopy(model)
    found = compare(wrap(model), single, x, y, rank, folder, fresh, shared_data=False)
    torch.manual_seed(rank)  # and noise of each process's own
    mine = sb.draw(model, x).detach()
    first = mine.clone()
    dist.broadcast(first, 0)
    found["noise"] = float((mine - first).abs().max())
    return found


def tensor_parallel(method, rank, folder, mesh, wraps):
    torch.manual_seed(0)
    network, x, y = Tokens(), torch.randint(11, (8, 4)), torch.randint(3, (8,))
    plain, fresh = copy.deepcopy(network), copy.deepcopy(network)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if method in ("MeanField", "EMP"):
        from torch.distributed.tensor import Replicate

        plan["table"] = RowwiseParallel(input_layouts=Replicate())
    options = {"include": ".*"} if method in ("MeanField", "EMP", "ECMP") else {}
    torch.manual_seed(10 + rank)  # what is new starts alike all the same
    model = sb.bayesianize(parallelize_module(network, mesh["tp"], plan), METHODS[method], **options)
    single = sb.bayesianize(plain, METHODS[method], **options)
    single.load_state_dict({key: whole(value).clone() for key, value in model.state_dict().items()})
    if wraps:
        for module in (model.up, model.down, model):
            fully_shard(module, mesh=mesh["dp"])
    found = compare(model, single, x, y, rank, folder, fresh, shared_data=True)
    mine = sb.draw(model, x).detach()  # without a key: the processes see one network, and so one noise
    first = mine.clone()
    dist.broadcast(first, 0)
    found["noise"] = float((mine - first).abs().max())
    return found


def unsupported():
    """Why this torch cannot train torch's own layer under FSDP2 on CPUs, or None."""
    try:
        layer = fully_shard(nn.Linear(4, 4))
        layer(torch.ones(2, 4)).sum().backward()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return str(error)
    return None


def refusals(mesh):
    """What cannot work says which order does."""
    made = sb.bayesianize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), sb.Rank1())
    sharded = fully_shard(sb.bayesianize(nn.Sequential(nn.Linear(4, 4)), sb.MeanField()))
    attempts = {
        "convert after fully_shard": lambda: sb.bayesianize(
            fully_shard(nn.Sequential(nn.Linear(4, 4))), sb.Rank1()
        ),
        "columns after conversion": lambda: parallelize_module(made, mesh["tp"], {"1": ColwiseParallel()}),
        "rows after conversion": lambda: parallelize_module(made, mesh["tp"], {"1": RowwiseParallel()}),
        "freeze": lambda: sb.freeze(sharded),
        "merge": lambda: sb.merge(sharded),
        "compress": lambda: sb.compress(sharded, rank=1),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


def monte_carlo():
    """The KL of a joint mixture is drawn: one number for all processes, and its gradient alike."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model = wrap(sb.bayesianize(network, sb.Rank1(components=2, kl_reduction="monte_carlo")))
    torch.manual_seed(dist.get_rank())
    kl = sb.kl(model)
    kl.backward()
    numbers = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(numbers, kl.detach())
    gradient = model[0].bayes.r.loc.grad
    return {"numbers": [float(n) for n in numbers], "gradient": float(whole(gradient).abs().sum())}


def main(out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank, folder = dist.get_rank(), Path(out)
    found = {"unsupported": unsupported(), "fsdp": {}, "tensor parallel": {}, "both": {}}
    for name in [] if found["unsupported"] else NETWORKS:
        for method in METHODS:
            if name == "recurrent" and "local" in method:  # refused, see docs/support.md
                continue
            if name != "dense" and method in (
                "Rank1 mean",
                "Rank1 halfcauchy",
                "Rank1 steps",
            ):  # same way, other numbers
                continue
            found["fsdp"][f"{name}, {method}"] = fsdp(name, method, rank, folder)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for method in METHODS:
        found["tensor parallel"][method] = tensor_parallel(method, rank, folder, mesh, wraps=False)
    for method in () if found["unsupported"] else ("Rank1", "KTied", "MeanField", "DeepEnsemble"):
        found["both"][method] = tensor_parallel(method, rank, folder, mesh, wraps=True)
    found["said"], found["monte carlo"] = refusals(mesh), monte_carlo()
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
    # Everything is written. Now and then a thread of gloo's aborts a process that is torn down under load, which says
    # nothing of what was measured.
    dist.barrier()
    os._exit(0)

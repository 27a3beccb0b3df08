"""TextLSTM and RecordNet: counts, Keras's start, bags against loops, padding, draws."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.lab.data import Bagging, Events, RecordBatches, Records
from slimbayes.lab.data.records import bag
from slimbayes.lab.models import RecordNet, TextLSTM, build
from slimbayes.lab.models.record_net import embedding_size


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(network):
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def test_text_lstm_counts_of_the_paper():
    """Without the head: the kernels get a spread (mean-field) or k·(m + n) more; nothing else does."""
    with torch.device("meta"):
        network = TextLSTM()
    body = trained(network) - trained(network.output)
    kernels = [network.lstm.weight_ih_l0, network.lstm.weight_hh_l0]
    assert [tuple(kernel.shape) for kernel in kernels] == [(512, 128)] * 2
    assert body + sum(kernel.numel() for kernel in kernels) == 2_822_656
    for rank, count in ((1, 2_692_864), (2, 2_694_144), (3, 2_695_424)):
        assert body + rank * sum(sum(kernel.shape) for kernel in kernels) == count


def test_keras_start():
    torch.manual_seed(0)
    network = TextLSTM(words=50, embedding=24, hidden=16)
    lstm = network.lstm
    bound = math.sqrt(6 / (24 + 64))
    assert lstm.weight_ih_l0.abs().max() <= bound < 1.05 * lstm.weight_ih_l0.abs().max()
    assert torch.allclose(lstm.weight_hh_l0.T @ lstm.weight_hh_l0, torch.eye(16), atol=1e-5)
    assert lstm.bias_ih_l0.tolist() == [0.0] * 16 + [1.0] * 16 + [0.0] * 32
    assert not lstm.bias_hh_l0.requires_grad and not lstm.bias_hh_l0.any()
    assert network.embedding.weight.abs().max() <= 0.05
    both = TextLSTM(words=50, embedding=24, hidden=16, single_bias=False)
    assert both.lstm.bias_hh_l0.requires_grad and trained(both) == trained(network) + 64


def test_text_lstm_is_the_recursion_of_the_textbook():
    torch.manual_seed(0)
    network = TextLSTM(words=9, embedding=5, hidden=4, outputs=2).double()
    tokens = torch.randint(9, (3, 6))
    h = c = torch.zeros(3, 4, dtype=torch.double)
    for step in range(6):
        x = network.embedding.weight[tokens[:, step]]
        z = x @ network.lstm.weight_ih_l0.T + h @ network.lstm.weight_hh_l0.T + network.lstm.bias_ih_l0
        i, f, g, o = z.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    assert torch.allclose(network(tokens), h @ network.output.weight.T + network.output.bias)


def test_text_lstm_by_name():
    network = build("lstm", (80,), 2, words=30, embedding=6, hidden=5)
    assert network(torch.zeros(3, 80, dtype=torch.long)).shape == (3, 2)
    with pytest.raises(ValueError, match=r"token ids, these inputs have shape \[3, 8, 8\]"):
        build("lstm", (3, 8, 8), 2)


def test_record_net_by_name():
    network = build("records", (7, 9, 3), 1, hidden=6, dense_hidden=5, dense=4)
    assert network(*batch().padded(torch.arange(5))).shape == (5, 1)
    with pytest.raises(ValueError, match=r"\(codes, levels, context columns\) of records, got \[80\]"):
        build("records", (80,), 2)


def batch(rows=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = 60
    columns = [torch.randint(low, high, (count,), generator=generator).numpy() for low, high in
               ((1, rows), (0, 400), (1, 7), (0, 9))]  # fmt: skip
    bagged = bag(rows, *columns, bagging=Bagging(60))
    context = torch.randn(rows, 3, generator=generator)
    return Records.of(bagged, context, torch.arange(rows) % 2, torch.arange(rows))


def network(**options):
    torch.manual_seed(1)
    return RecordNet(7, 9, 3, **{"hidden": 6, "dense": 4, "dense_hidden": 5, **options}).double().eval()


def double(events):
    return Events(*(column.double() if column.is_floating_point() else column for column in events))


@pytest.mark.parametrize("combine", ["mean", "sum"])
def test_record_net_is_the_formula(combine):
    records, net = batch(), network(combine=combine)
    events = double(records.padded(torch.arange(5)))
    events = events._replace(weights=events.weights * 0.3)  # any weights, not counts alone
    found = net(*events)
    for row in range(5):
        steps = []
        for t in range(int(events.lengths[row])):
            inside = (events.bags[row] == t) & (events.weights[row] > 0)
            parts = []
            for table, index, mask in (
                (net.codes, events.codes[row], inside),
                (net.values, events.levels[row], inside & (events.levels[row] > 0)),
            ):
                w = events.weights[row][mask]
                total = (w[:, None] * table.weight[index[mask]]).sum(0)
                parts.append(total / w.sum() if combine == "mean" and len(w) else total)
            steps.append(torch.cat([*parts, torch.log1p(events.ages[row, t : t + 1])]))
        _, (h, _) = net.lstm(torch.stack(steps)[None])
        x = torch.cat([h[0, 0], events.context[row]])
        wanted = net.output(net.hidden(x).clamp(0, 6))
        assert torch.allclose(found[row], wanted, atol=1e-12)


def test_padding_and_neighbours_do_not_matter():
    records, net = batch(), network(layers=2)
    together = net(*double(records.padded(torch.arange(5))))
    alone = torch.cat([net(*double(records.padded(torch.tensor([row])))) for row in range(5)])
    assert torch.allclose(together, alone, atol=1e-12)


def test_record_net_options():
    assert network(dense_hidden=0).output.in_features == 6 + 3
    with pytest.raises(ValueError, match="combine='max' is unknown"):
        network(combine="max")
    assert (
        RecordNet(1000, 9, 3, multiplier=0.984215).codes.embedding_dim == embedding_size(1000, 0.984215) == 33
    )
    assert embedding_size(1, 0.01) == 1


def test_gradients_reach_what_is_trained():
    records, net = batch(), network().train()
    net(*double(records.padded(torch.arange(5)))).square().sum().backward()
    without = [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == ["lstm.bias_hh_l0"]


def test_draws_fold_the_rows_of_every_input():
    records, net = batch(), network()
    events = double(records.padded(torch.arange(5)))
    plain = net(*events)
    rules = [(nn.Embedding, sb.MeanField()), (nn.Linear, sb.MeanField())]
    model = sb.bayesianize(net, rules)
    still = sb.draw(model, *events, samples=3, noise="mean")
    assert still.shape == (3, 5, 1) and torch.allclose(still, plain.expand(3, -1, -1), atol=1e-12)
    moving = sb.draw(model, *events, samples=3, seed=0)
    parts = [sb.draw(model, *records_rows(records, rows), samples=3, seed=0, first_example=rows[0])
             for rows in ([0, 1], [2, 3, 4])]  # fmt: skip
    assert torch.allclose(moving, torch.cat(parts, 1), atol=1e-6)
    assert (moving.std(0) > 0).all()


def records_rows(records, rows):
    return double(records.padded(torch.tensor(rows)))


def test_fit_takes_the_batches():
    pytest.importorskip("lightning")
    records, net = batch(rows=20), network().float()
    model = sb.bayesianize(net, sb.MeanField(), include=nn.Linear)
    result = sb.fit(model, RecordBatches(records, 4), steps=3, likelihood=sb.Bernoulli())
    assert math.isfinite(result.history[-1]["nll"])


@pytest.mark.filterwarnings("ignore:.*left alone")
def test_a_run_on_texts(tmp_path):
    pytest.importorskip("lightning")
    from slimbayes.lab.compare import evaluate_run
    from slimbayes.lab.config import RunConfig
    from slimbayes.lab.runs import load_run, train_run
    from slimbayes.training import Training

    rng = np.random.default_rng(0)
    arrays = {
        "tokens": rng.integers(1, 30, 400),
        "offsets": np.arange(0, 401, 10),
        "labels": np.arange(40) % 2,
    }
    np.savez(tmp_path / "imdb.npz", **{f"{p}_{k}": v for p in ("train", "test") for k, v in arrays.items()})
    config = RunConfig(
        "imdb", network="lstm(words=30, embedding=4, hidden=3)", method="MeanField", draws=2,
        training=Training(steps=2, batch_size=10), data_options={"length": 6},
    )  # fmt: skip
    train_run(config, tmp_path / "run", data_root=str(tmp_path), progress=False)
    run = load_run(tmp_path / "run", device="cpu")
    assert run.facts.kind == "text" and run.prepared(torch.zeros(2, 6, dtype=torch.long)).dtype == torch.int64
    found = evaluate_run(run, tmp_path / "run", data_root=str(tmp_path), shifts=())
    assert math.isfinite(found["methods"][0]["runs"][0]["clean"]["nll"])

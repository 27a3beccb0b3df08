"""Networks whose rows see each other: each draw has to be the network's own output, whatever the other draws are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.core.conversion import find_record

METHODS = {
    "Rank1": lambda: sb.Rank1(components=2),
    "MeanField": sb.MeanField,
    "KTied": sb.KTied,
    "DeepEnsemble": lambda: sb.DeepEnsemble(2),
    "EMP": lambda: sb.EMP(components=2),
    "ECMP": lambda: sb.ECMP(components=2),
    "BatchEnsemble": lambda: sb.BatchEnsemble(components=3),
}


class Graph(nn.Module):
    """Two steps of messages over edges [2, E]; every node has one from the one before it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, edges):
        for layer in (self.first, self.last):
            x = torch.relu(layer(x.index_add(0, edges[1], x[edges[0]])))
        return x


class Pooled(Graph):
    """One output for each of two graphs, by a layer of its own after the nodes are summed."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x, edges):
        x = super().forward(x, edges)
        return self.head(torch.stack([x[:3].sum(0), x[3:].sum(0)]))


class Contrastive(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 8), nn.Linear(4, 8)

    def forward(self, x):
        return self.image(x) @ self.text(x).T


class Attention(nn.Module):
    """Over the batch, without a number of rows that would tell."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.first(x)
        return self.last((h @ h.T / 3).softmax(-1) @ h)


class Centred(Attention):
    def forward(self, x):
        h = torch.relu(self.first(x))
        return self.last(h - h.mean(0))


class Summed(Attention):
    """Rows see those before them."""

    def forward(self, x):
        return self.last(torch.relu(self.first(x)).cumsum(0))


class Wired(Graph):
    """Edges that belong to the network."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", EDGES)

    def forward(self, x):
        return super().forward(x, self.edges)


class Placed(Attention):
    """Every row has something of its own added, by its place in the batch, through a layer that sees a table."""

    def forward(self, x):
        return self.last(self.first(x) + self.first(torch.eye(8)[:, :4])[: len(x)])


class Words(Attention):
    """Integers alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids):
        return super().forward(self.table(ids).mean(1))


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
EDGES = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
NETWORKS = {
    "graph": (Graph, (X, EDGES)),
    "pooled": (Pooled, (X, EDGES)),
    "contrastive": (Contrastive, (X,)),
    "attention": (Attention, (X,)),
    "centred": (Centred, (X,)),
    "summed": (Summed, (X,)),
    "wired": (Wired, (X,)),
    "placed": (Placed, (X,)),
    "words": (Words, (torch.arange(24).view(6, 4),)),
}


def made(kind):
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_draw_is_the_network_itself(name, training):
    """With noise="mean" and three samples the errors of the graph were [0, 0.45, 0.45]."""
    kind, inputs = NETWORKS[name]
    net = made(kind)
    expected = net(*inputs)
    model = sb.bayesianize(copy.deepcopy(net), sb.MeanField()).train(training)
    draws = sb.draw(model, *inputs, samples=3, noise="mean")
    assert draws.shape == (3, *expected.shape)
    assert [round((d - expected).abs().max().item(), 5) for d in draws] == [0, 0, 0]
    assert sb.predict(model, *inputs, samples=3, noise="mean").mean.shape == expected.shape


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("method", [*METHODS, "one component"])
def test_layers_behind_the_nodes_have_rows_of_their_own(method, noise, seed):
    """A head sees two graphs, where the layers before it saw six nodes."""
    chosen = sb.Rank1() if method == "one component" else METHODS[method]()
    model = sb.bayesianize(made(Pooled), chosen)
    draws = sb.draw(model, X, EDGES, samples=2, noise=noise, seed=seed)
    assert draws.shape[1:] == (2, 2) and torch.isfinite(draws).all()
    sb.elbo(draws, torch.tensor([0, 1]), model, num_data=100).loss.backward()
    heads = [p.grad for name, p in model.named_parameters() if name.startswith("head")]
    assert any(g is not None and g.abs().sum() > 0 for g in heads)
    if seed is not None:
        cut = sb.predict(model, X, EDGES, samples=2, noise=noise, seed=seed, chunk=1)
        torch.testing.assert_close(cut.draws, draws, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_passes_have_the_numbers_of_rows(method, noise):
    """Under one seed, on a network whose rows do not see each other: outputs, gradients, KL, draws made again."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), METHODS[method]())
    y = torch.randint(3, (6,))
    found = {}
    for layout in ("rows", "passes"):
        model.zero_grad()
        draws = sb.draw(
            model, X, samples=2, noise=noise, seed=7, first_example=3, first_sample=1, layout=layout
        )
        sb.elbo(draws, y, model, num_data=100).loss.backward()
        found[layout] = [draws, *(p.grad for p in model.parameters() if p.grad is not None)]
    for a, b in zip(found["rows"], found["passes"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    again = sb.draw(
        model,
        X,
        samples=2,
        noise=noise,
        seed=7,
        first_example=3,
        first_sample=1,
        layout="passes",
        draws=[1, 0],
    )
    torch.testing.assert_close(again, found["rows"][0][[1, 0]], rtol=1e-5, atol=1e-6)


def test_passes_learn_a_mixing():
    """The scores of the indices of all draws, by whose losses the mixing learns."""
    torch.manual_seed(0)
    model, plain = (
        sb.bayesianize(made(make), sb.EMP(components=3, learn_mixing=True, init_noise=0.5))
        for make in (Contrastive, lambda: nn.Linear(4, 3))
    )
    y = torch.arange(6)

    def gradients(layout, network, target):
        network.zero_grad()
        draws = sb.draw(network, X, samples=4, seed=5, layout=layout)
        sb.elbo(draws, target, network, num_data=100).loss.backward()
        return [p.grad for name, p in network.named_parameters() if "logits" in name]

    assert sum(g.abs().sum() for g in gradients("auto", model, y)) > 1e-4
    for a, b in zip(gradients("rows", plain, y % 3), gradients("passes", plain, y % 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_components_of_a_step_take_passes():
    model = sb.bayesianize(made(Attention), sb.Rank1(components=4, components_per_step=2)).train()
    kept = sb.draw(model, X, seed=3, noise="shared")
    assert kept.shape == (2, 6, 3)
    linear = sb.bayesianize(nn.Linear(4, 3), sb.Rank1(components=4, components_per_step=2)).train()
    rows, passes = (sb.draw(linear, X, samples=2, seed=3, layout=layout) for layout in ("rows", "passes"))
    torch.testing.assert_close(rows, passes, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 6, 24])
@pytest.mark.parametrize("name", ["graph", "contrastive", "attention"])
def test_a_chunk_changes_nothing(name, chunk):
    """samples=8 and samples=8, chunk=6 were 0.40 apart under one seed: a batch whose rows belong together was cut."""
    kind, inputs = NETWORKS[name]
    model = sb.bayesianize(made(kind), sb.Rank1(random_sign_init=-0.5))
    whole = sb.predict(model, *inputs, samples=8, seed=1)
    cut = sb.predict(model, *inputs, samples=8, seed=1, chunk=chunk)
    torch.testing.assert_close(whole.draws, cut.draws)
    moments = sb.predict(model, *inputs, samples=8, seed=1, chunk=chunk, keep_draws=False)
    torch.testing.assert_close(whole.mean, moments.mean)


def test_evaluate_cuts_no_graph():
    model = sb.bayesianize(made(Graph), sb.MeanField())
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    whole, cut = (
        sb.evaluate(model, [((X, EDGES), y)], samples=4, seed=0, chunk=chunk) for chunk in (None, 3)
    )
    assert whole == pytest.approx(cut)
    graphs = sb.evaluate(sb.bayesianize(made(Pooled), sb.MeanField()), [((X, EDGES), y[:2] % 2)], samples=2)
    assert graphs["examples"] == 2


def test_networks_that_mix_only_in_training_are_told_by_hand():
    class Trained(Attention):
        def forward(self, x):
            h = self.first(x)
            return (h @ h.T).logsumexp(1).mean() if self.training else self.last(h)

    net = made(Trained)
    expected = net(X)
    model = sb.bayesianize(net, sb.MeanField()).train()
    draws = sb.draw(model, X, samples=3, noise="mean", layout="passes")
    torch.testing.assert_close(draws, expected.expand(3))
    with pytest.raises(ValueError, match="unknown layout 'sheets'"):
        sb.draw(model, X, layout="sheets")


def test_a_verdict_is_kept_and_a_copy_has_none():
    calls = []
    model = sb.bayesianize(made(Attention), sb.MeanField())
    model.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    for rows in (6, 6, 5):  # other numbers of rows are the same kind of input
        calls.clear()
        assert sb.draw(model, X[:rows], samples=2).shape == (2, rows, 3)
    assert calls == [5, 5]
    assert not copy.deepcopy(model)._slimbayes.verdicts


def test_compiled_code_takes_the_verdict_of_an_earlier_call():
    net = made(Attention)
    expected = net(X)
    model = sb.bayesianize(net, sb.MeanField())
    sb.draw(model, X, samples=2)
    compiled = torch.compile(
        lambda x: sb.draw(model, x, samples=2, noise="mean"), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(X), expected.expand(2, 6, 3))
    fresh = sb.bayesianize(made(Attention), sb.MeanField())
    by_hand = torch.compile(
        lambda x: sb.draw(fresh, x, samples=2, noise="mean", layout="passes"), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(by_hand(X), expected.expand(2, 6, 3))


@pytest.mark.accelerate  # freezing finds out with its late tiling where draws part
def test_a_frozen_model_refuses_rows_that_are_mixed():
    model = sb.bayesianize(made(Attention), sb.MeanField())
    with pytest.raises(ValueError, match="see each other"):
        sb.freeze(model, draws=4, example=X)
    assert sb.freeze(model, draws=1, example=X)(X).shape == (1, 6, 3)


# No false alarms


class Counting(nn.Module):
    """Remembers its last rows, as a network with a cache or a state does, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), None
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = self.layer(x)
        if self.last is not None and len(self.last) == len(y):
            y = y + self.last
        self.last = y.detach()
        return y


class Noisy(nn.Linear):
    """Random by itself, in every mode."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, training=True) + torch.randn(len(x), 1)


class Broken(nn.Linear):
    """Some outputs are NaN, others infinite."""

    def forward(self, x):
        return super().forward(x).log() + 1 / torch.tensor([0.0, 1, 1])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 5, 2, batch_first=True)

    def forward(self, x):
        return self.rnn(x)


class Lossy(nn.Linear):
    """Outputs beside a mean loss, as Hugging Face's have, and a table."""

    def forward(self, x, labels):
        y = super().forward(x)
        return {"loss": F.cross_entropy(y, labels), "logits": y, "table": torch.eye(3)}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x, labels):
        return self.inner(self.first(x), labels)


class Routed(nn.Module):
    """Every row goes to one of two experts."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        return torch.where(chosen[:, None] == 0, self.experts[0](x), self.experts[1](x)), chosen


IMAGES = torch.randn(4, 3, 8, 8)
PLAIN = {
    "norms": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 3)
        ),
        (IMAGES,),
    ),
    "half": (lambda: nn.Sequential(nn.Linear(4, 64), nn.Softmax(-1), nn.Linear(64, 3)).bfloat16(), (X.bfloat16(),)),
    "noisy": (lambda: nn.Sequential(nn.Linear(4, 4), Noisy(4, 3)), (X,)),
    "broken": (lambda: nn.Sequential(nn.Linear(4, 4), Broken(4, 3)), (X,)),
    "recurrent": (Recurrent, (torch.randn(6, 5, 4),)),
    "loss beside": (lambda: Wrapped(Lossy(4, 3)), (X, torch.tensor([0, 1, 2, 0, 1, 2]))),
    "routed": (Routed, (X,)),
    "large offset": (lambda: nn.Sequential(nn.Linear(4, 3)), (X + 1e4,)),
    "zeros": (lambda: nn.Linear(4, 3), (torch.zeros(6, 4),)),
    "one": (lambda: nn.Linear(4, 3), (X[:1],)),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2),
        (torch.randn(6, 5, 4),),
    ),
    "looped": (lambda: Looped(), (X,)),
    "words": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3)),
        (torch.arange(18).view(6, 3) % 9,),
    ),
}  # fmt: skip


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.GRUCell(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = torch.zeros_like(x)
        for _ in range(3):
            h = self.rnn(x, h)
        return self.head(h)


@pytest.mark.parametrize("method", ["Rank1", "MeanField", "EMP", "DeepEnsemble"])
@pytest.mark.parametrize("name", PLAIN)
def test_plain_networks_are_not_found_to_mix(name, method):
    make, inputs = PLAIN[name]
    model = sb.bayesianize(made(make), METHODS[method]())
    sb.draw(model, *inputs, samples=2, noise="mean")
    verdicts = list(model._slimbayes.verdicts.values())
    assert len(verdicts) == 1 and not verdicts[0].mixed
    fresh = sb.bayesianize(made(make), METHODS[method]()).eval()
    state, generator = copy.deepcopy(fresh.state_dict()), torch.get_rng_state()
    sb.draw(fresh, *inputs, samples=2, noise="mean")
    assert all(torch.equal(value, state[key]) for key, value in fresh.state_dict().items())
    assert name == "noisy" or torch.equal(torch.get_rng_state(), generator)


def test_a_probe_leaves_no_trace_in_a_network_with_a_state():
    model = sb.bayesianize(Counting(), sb.MeanField())
    sb.draw(model, X, samples=2)
    assert int(model.calls) == 1 and model.last.shape == (12, 3)
    assert not next(iter(model._slimbayes.verdicts.values())).mixed


def test_clip_has_one_row_per_image():
    """``predict(samples=3).mean`` was [3, 9]: every draw's images were compared with every draw's texts."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={
            **small,
            "vocab_size": 40,
            "max_position_embeddings": 8,
            "eos_token_id": 39,
            "bos_token_id": 1,
        },
        vision_config={**small, "image_size": 16, "patch_size": 8},
        projection_dim=8,
    )
    torch.manual_seed(0)
    net = transformers.CLIPModel(config).eval()
    inputs = {
        "input_ids": torch.randint(2, 38, (3, 6)),
        "pixel_values": torch.randn(3, 3, 16, 16),
        "attention_mask": torch.ones(3, 6, dtype=torch.long),
    }
    with torch.no_grad():
        expected = net(**inputs).logits_per_image
    model = sb.bayesianize(net, sb.MeanField())
    draws = sb.draw(model, **inputs, samples=2, noise="mean").logits_per_image
    torch.testing.assert_close(draws, expected.expand(2, 3, 3), rtol=1e-4, atol=1e-5)
    predicted = sb.predict(model, **inputs, samples=3, select=lambda output: output.logits_per_image)
    assert predicted.mean.shape == (3, 3)


def test_statistics_of_the_batch_are_no_mixing():
    """A norm that keeps no running statistics takes the batch's in eval mode, too."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), norm, nn.Linear(4, 2)), sb.MeanField())
    sb.draw(model, torch.randn(6, 3), samples=3)
    assert not any(verdict.mixed for verdict in find_record(model).verdicts.values())
    assert not norm._forward_hooks

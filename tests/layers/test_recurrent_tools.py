"""Recurrent layers with everything around them: checkpoints, summaries, analyses, compiled code, errors."""

import pickle

import pytest
import torch
from helpers_sequences import BATCH, HIDDEN, LAYERS, SIZE, Looped, Sequences, inputs
from torch import nn

import slimbayes as sb
from slimbayes.accelerate.late_tiling import LATE_TILING
from slimbayes.core.context import current_draw
from slimbayes.core.conversion import converted_layers, find_record

METHODS = {
    "rank1": sb.Rank1.paper(components=2),
    "batch_ensemble": sb.BatchEnsemble(components=2),
    "meanfield": sb.MeanField.paper(),
    "flipout": sb.MeanField.paper(estimator="flipout"),
    "ktied": sb.KTied.paper(),
    "emp": sb.EMP.paper(patch=("rnn", "cell", "output"), init_noise=0.1),
    "ecmp": sb.ECMP.paper(patch=("rnn", "cell", "output"), init_noise=0.1, learn_mixing=True),
    "dropout": sb.MCDropout(),
    "drop_connect": sb.DropConnect(),
}


class Net(nn.Module):
    """Words, a recurrent layer, a cell and a head: classes of a sentence."""

    def __init__(self, kind="lstm", **options):
        super().__init__()
        self.words = nn.Embedding(7, SIZE)
        make, own = LAYERS[kind]
        self.rnn = make(SIZE, HIDDEN, batch_first=True, **own, **options)
        self.cell = nn.GRUCell(self.rnn.proj_size or HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, words):
        y, _ = self.rnn(self.words(words))
        state = None
        for t in range(y.shape[1]):
            state = self.cell(y[:, t], state)
        return self.head(state)


def words(batch=BATCH):
    return torch.randint(7, (batch, 5), generator=torch.Generator().manual_seed(0))


def converted(method, **options):
    torch.manual_seed(0)
    return sb.bayesianize(Net(**options), METHODS[method])


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints(method, tmp_path):
    plain = Net(num_layers=2, proj_size=2)
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    model = converted(method, num_layers=2, proj_size=2)
    assert set(before) <= set(model.state_dict())
    model.load_state_dict(before, strict=False)  # from before the conversion: expanded to all components
    for name, saved in before.items():
        assert torch.equal(model.state_dict()[name].expand_as(model.state_dict()[name]), saved.expand_as(
            model.state_dict()[name]
        ))  # fmt: skip
    sb.save(model, tmp_path / "net")
    again = sb.load(Net(num_layers=2, proj_size=2), tmp_path / "net")
    for twin in (again, pickle.loads(pickle.dumps(model))):
        for noise in ("example", "shared", "mean"):
            a, b = (sb.draw(m, words(), samples=2, seed=1, noise=noise) for m in (model, twin))
            assert torch.equal(a, b)
        assert [n for n, _ in converted_layers(twin)] == [n for n, _ in converted_layers(model)]


@pytest.mark.parametrize("method", METHODS)
def test_one_training_step(method):
    """Every parameter has a gradient, and the groups of the optimizer hold each once."""
    model = converted(method, num_layers=2, bidirectional=False)
    groups = sb.parameter_groups(model, lr=0.1, weight_decay=0.1)
    sb.elbo(sb.draw(model, words(), samples=6), torch.zeros(BATCH).long(), model, num_data=50).loss.backward()
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    means = method in ("meanfield", "flipout", "ktied")
    assert (id(model.rnn.weight_hh_l1) in decayed) == (not means)
    assert not any(id(p) in decayed for name, p in model.named_parameters() if ".bayes." in name)
    torch.optim.SGD(groups).step()


def test_summary_and_names():
    model = converted("meanfield", bidirectional=False)
    rows = {row.name: row for row in sb.summary(model).rows}
    assert rows["rnn"].layer == "LSTM" and rows["cell"].layer == "GRUCell"
    assert rows["rnn"].parameters == 2 * rows["rnn"].base_parameters
    assert [name for name, _ in converted_layers(model)] == [
        "rnn.ih_l0",
        "rnn.hh_l0",
        "cell.ih",
        "cell.hh",
        "head",
    ]
    assert not [row for row in sb.summary(model).left_alone if row[0] in ("rnn", "cell")]


def test_analyses():
    model = converted("meanfield", num_layers=2)
    shapes = {name: tuple(w.stddev.shape) for name, w in sb.analysis.matrices(model).items()}
    assert shapes["rnn.ih_l0"] == (SIZE, 4 * HIDDEN) and shapes["rnn.hh_l1"] == (HIDDEN, 4 * HIDDEN)
    assert set(sb.analysis.matrices(model, include=nn.LSTM)) == {n for n in shapes if n.startswith("rnn")}
    small = sb.analysis.truncate(model, rank=1)
    for share in sb.analysis.spectrum(small, include="rnn").values():
        assert share["stddev"][0] > 0.999
    spread = sb.analysis.component_spread(converted("rank1"))
    assert set(spread) == {"rnn.ih_l0", "rnn.hh_l0", "cell.ih", "cell.hh", "head"}


def test_compress(tmp_path):
    model = converted("meanfield", num_layers=2, bidirectional=False)
    tied = sb.compress(model, rank=2)
    assert torch.equal(sb.draw(tied, words(), noise="mean"), sb.draw(model, words(), noise="mean"))
    assert sb.summary(tied).parameters < sb.summary(model).parameters
    assert {type(m).__name__ for m in find_record(tied).methods} == {"KTied"}
    sb.save(tied, tmp_path / "tied")
    again = sb.load(Net(num_layers=2), tmp_path / "tied")
    assert torch.equal(sb.draw(again, words(), seed=1), sb.draw(tied, words(), seed=1))
    part = sb.compress(model, rank=1, include=nn.LSTM)
    assert {type(m).__name__ for m in find_record(part).methods} == {"KTied", "MeanField"}
    with pytest.raises(ValueError, match=r"kernels of layer 'rnn'.*hh_l0"):
        sb.compress(model, rank=1, include=r"rnn\.ih")


def test_tied_layers_share_one_posterior():
    net = nn.Sequential(Sequences(batch_first=True), nn.Linear(HIDDEN, SIZE), Sequences(batch_first=True))
    net[2].rnn.weight_hh_l0 = net[0].rnn.weight_hh_l0
    model = sb.bayesianize(net.double(), sb.MeanField.paper(), include=[r"^0\.rnn"])
    assert "2.rnn" in find_record(model).layers  # what shares a random weight follows
    first, second = model[0].rnn.kernels[1].bayes, model[2].rnn.kernels[1].bayes
    assert first.weight is second.weight and first.weight_source == second.weight_source
    with torch.no_grad():
        names = [n for n, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert torch.isfinite(sb.kl(model))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
def test_late_tiling_has_the_same_draws(method, noise):
    model = converted(method, num_layers=2).eval()
    with torch.no_grad(), sb.fast_paths(late=True):
        late = sb.draw(model, words(6), samples=3, seed=1, noise=noise)
        plans = [plan for plan in LATE_TILING.plans.get(model, {}).values() if plan is not None]
        with sb.fast_paths(late=False):
            plain = sb.draw(model, words(6), samples=3, seed=1, noise=noise)
    torch.testing.assert_close(late, plain, rtol=1e-5, atol=1e-6)
    assert plans and plans[0].layers == {"rnn"}  # the words are looked up once for all draws


class TimeFirst(nn.Module):
    """The batch in the second axis inside, and a table that is none of the batch."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(SIZE, HIDDEN)

    def forward(self, x):
        return self.rnn(x)[0]


def test_rows_are_the_second_axis():
    model = sb.bayesianize(TimeFirst(), sb.MeanField.paper())
    for steps in (4, 8):  # as many as rows, or twice: only another batch shows that they are none
        with pytest.raises(ValueError, match="'rnn'"):
            sb.draw(model, torch.randn(4, steps, SIZE), samples=3)
    layer = sb.bayesianize(nn.LSTM(SIZE, HIDDEN), sb.Rank1.paper(components=2))
    with pytest.raises(ValueError, match="do not divide"):
        layer(torch.zeros(5, 3, SIZE))
    assert layer(torch.zeros(5, 4, SIZE))[0].shape == (5, 4, HIDDEN)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
def test_what_is_refused_says_so():
    for method in (sb.MeanField.paper(estimator="local"), sb.KTied.paper(estimator="local")):
        with pytest.raises(TypeError, match=r"'rnn' of type LSTM.*every time step.*exclude='rnn'"):
            sb.bayesianize(Sequences(), method)
    with pytest.raises(TypeError, match=r"DeepEnsemble cannot convert layer 'rnn'.*whole network"):
        sb.bayesianize(Sequences(), sb.DeepEnsemble(), include="rnn")
    net = Sequences()
    torch.nn.utils.weight_norm(net.rnn, "weight_hh_l0")
    with pytest.raises(ValueError, match=r"layer 'rnn' computes its 'weight_hh_l0'.*exclude='rnn'"):
        sb.bayesianize(net, sb.MeanField.paper())
    assert type(net.rnn) is nn.LSTM
    with pytest.raises(ValueError, match="converted already"):
        sb.bayesianize(converted("rank1"), sb.Rank1.paper())


def test_the_ensemble_of_a_network_with_recurrent_layers():
    torch.manual_seed(0)
    model = sb.bayesianize(Net(num_layers=2), sb.DeepEnsemble(members=3))
    draws = sb.draw(model, words())
    assert draws.shape == (3, BATCH, 2) and not torch.allclose(draws[0], draws[1])


@pytest.mark.parametrize("verb", [sb.draw, sb.predict])
def test_packed_sequences_are_no_inputs_of_a_draw(verb):
    model = sb.bayesianize(nn.LSTM(SIZE, HIDDEN), sb.MeanField.paper())
    packed = nn.utils.rnn.pack_sequence([torch.zeros(2, SIZE), torch.zeros(1, SIZE)])
    for args, named, name in (
        ((packed,), {}, "0"),
        ((), {"input": packed}, "'input'"),
        (({"x": packed},), {}, "0"),
    ):
        with pytest.raises(TypeError, match=f"input {name} is a PackedSequence.*lengths.*pack inside"):
            verb(model, *args, **named)


@pytest.mark.parametrize("method", ["meanfield", "rank1"])
def test_compiled(method):
    """The layer, or the whole draw, is left to eager code; nothing of the draw stays behind."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sb.bayesianize(Sequences(batch_first=True), METHODS[method])
    x, likelihood = inputs(dtype=torch.float32), sb.Gaussian()
    compiled = torch.compile(model, backend="eager")
    a, b = (sb.draw(m, x, samples=2, seed=1) for m in (model, compiled))
    torch.testing.assert_close(a, b)

    def step(x):
        draws = sb.draw(model, x, seed=2)
        return sb.elbo(draws, torch.zeros_like(draws[0]), model, num_data=9, likelihood=likelihood).loss

    loss = torch.compile(step, backend="eager")(x)
    loss.backward()
    assert current_draw() is None and model.rnn.weight_hh_l0.grad.any()
    torch.testing.assert_close(loss, step(x))
    torch._dynamo.reset()


def test_fit_many_says_what_it_cannot_do():
    data = (words(8), torch.zeros(8).long())
    models = [converted("meanfield") for _ in range(2)]
    with pytest.raises((TypeError, RuntimeError, ValueError), match=r"rnn|LSTM"):
        sb.fit_many(models, [data] * 2, epochs=1, batch_size=4)


def test_own_dropout_follows_the_mode_and_the_method():
    x = inputs(dtype=torch.float32)
    for method, active in ((sb.MeanField.paper(stddev_init=1e-6), False), (sb.MCDropout(rate=0.0), True)):
        torch.manual_seed(0)
        model = sb.bayesianize(Sequences(num_layers=2, dropout=0.5, batch_first=True), method)
        for training in (True, False):
            model.train(training)
            a, b = (sb.draw(model, x) for _ in range(2))
            dropped = active or training
            assert torch.allclose(a, b, atol=1e-4) != dropped
        silent = [sb.draw(model, x, noise="mean") for _ in range(2)]
        assert torch.equal(*silent)


def test_a_cell_outside_of_a_draw_draws_at_every_call():
    model = sb.bayesianize(Looped(), sb.Rank1.paper(components=1, dropout_rate=0.2))
    x = torch.ones(2, SIZE)
    assert not torch.allclose(model.cell(x)[0], model.cell(x)[0])
    assert model.cell(x[0])[0].shape == (HIDDEN,)

"""Matrices and spectra of posteriors, the clipped SVD, and compression to k-tied: against closed forms and by hand."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributions import Normal, kl_divergence

import slimbayes as sb
from slimbayes import models
from slimbayes.verbs.compression import factorize, tied_kl

D = torch.float64


def planted(m, n, rank, seed=0):
    """A positive matrix of this nonnegative rank."""
    random = torch.Generator().manual_seed(seed)
    u, v = (torch.randn(size, rank, dtype=D, generator=random).mul(0.7).exp() for size in (m, n))
    return 0.01 * u @ v.t()


def give_stddev(layer, sigma):
    """Set σ of a mean-field layer's weight, from [first axis, the others]."""
    with torch.no_grad():
        rho = layer.bayes.weight.rho
        rho.copy_(torch.log(torch.expm1(sigma - 1e-7)).reshape(rho.shape))


def mean_field(build, method=None, rank=None, **options):
    """A model whose weights have σ of a given nonnegative rank."""
    torch.manual_seed(0)
    model = sb.bayesianize(
        build(), sb.MeanField.paper(stddev_init=0.05) if method is None else method, **options
    )
    for seed, layer in enumerate(m for m in model.modules() if hasattr(m, "bayes")):
        if rank is not None and layer.weight.dim() > 1:
            give_stddev(layer, planted(len(layer.weight), layer.weight[0].numel(), rank, seed))
    return model


def convnet():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.ReLU(), nn.Linear(12, 3)
    )  # fmt: skip


def dense():
    return nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 3))


class Tied(nn.Module):
    """A language model in small: the table of words is the output's weight too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.relu(self.inner(self.table(x))))


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(before, model):
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "method", [sb.MeanField.paper(stddev_max=0.0102), sb.KTied.paper(rank=2)], ids=["capped", "k-tied"]
)
def test_matrices_are_inputs_by_outputs(method):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.line = nn.Conv2d(3, 4, (2, 5)), nn.Conv1d(3, 4, 5)
            self.back, self.dense = nn.ConvTranspose2d(3, 4, (2, 5)), nn.Linear(6, 7)
            self.pair, self.table, self.norm = nn.Bilinear(2, 3, 4), nn.Embedding(9, 5), nn.BatchNorm1d(3)

    torch.manual_seed(0)
    model = sb.bayesianize(Many(), method, exclude="norm", include=".")
    found = sb.analysis.matrices(model)
    for name, which, index in (
        ("conv", lambda w: w[3, 1, 0, 4], (0 * 5 * 3 + 4 * 3 + 1, 3)),  # [h, w, i, o]
        ("line", lambda w: w[3, 1, 4], (4 * 3 + 1, 3)),
        ("back", lambda w: w[1, 3, 0, 4], (1, 4 * 4 + 3)),
        ("dense", lambda w: w[5, 2], (2, 5)),
        ("pair", lambda w: w[3, 1, 2], (1 * 3 + 2, 3)),
        ("table", lambda w: w[8, 2], (8, 2)),
    ):
        layer = getattr(model, name)
        sigma = layer.bayes.weight(layer.weight).scale.detach()
        assert found[name].mean[index] == which(layer.weight)
        assert found[name].stddev[index] == which(sigma)
        assert torch.equal(found[name].stddev.flatten().sort()[0], sigma.flatten().sort()[0])
        assert found[name].mean.shape == found[name].stddev.shape and not found[name].stddev.requires_grad
        assert sb.analysis.stddevs(model)[name] == pytest.approx(float(sigma.mean()), rel=1e-5)
        if isinstance(method, sb.KTied):  # and it is tied as it is shown
            assert float(sb.analysis.spectrum(model)[name]["stddev"][:2].sum()) == pytest.approx(
                1.0, abs=1e-9
            )
    assert set(found) == {"conv", "line", "back", "dense", "pair", "table"}
    if isinstance(method, sb.MeanField):
        assert max(float(w.stddev.max()) for w in found.values()) == pytest.approx(0.0102)
    before = found["dense"].mean.clone()
    nn.init.zeros_(model.dense.weight)
    assert torch.equal(found["dense"].mean, before)  # a copy


def test_explained_variance():
    matrix = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(matrix.double()).square()
    for given in (matrix, matrix.t(), matrix.double()):
        assert torch.allclose(
            sb.analysis.explained_variance(given), values / values.sum(), atol=1e-14, rtol=0
        )
    gram = torch.linalg.eigvalsh(matrix.double().t() @ matrix.double()).flip(0)
    assert torch.allclose(sb.analysis.explained_variance(matrix), gram / gram.sum(), atol=1e-14, rtol=0)
    assert torch.equal(sb.analysis.explained_variance(torch.zeros(3, 2)), torch.zeros(2, dtype=D))
    for wrong in (torch.zeros(3), torch.full((2, 2), torch.nan), torch.zeros(2, 2, device="meta"), [[1.0]]):
        with pytest.raises(ValueError, match="explained_variance"):
            sb.analysis.explained_variance(wrong)


def test_spectrum_takes_means_and_stddevs_of_the_selected_layers():
    model = mean_field(dense, rank=2)
    found = sb.analysis.spectrum(model, include="^[02]$")
    assert set(found) == {"0", "2"}
    for name, parts in found.items():
        weights = sb.analysis.matrices(model)[name]
        assert torch.equal(parts["mean"], sb.analysis.explained_variance(weights.mean))
        assert float(parts["stddev"][:2].sum()) == pytest.approx(1.0, abs=1e-9)
        assert float(parts["mean"][:2].sum()) < 0.9


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_truncation_is_the_clipped_svd(rank):
    model = mean_field(lambda: convnet().double(), sb.MeanField.paper(stddev_init=0.05, estimator="flipout"))
    with torch.no_grad():  # heavy tails, so that a truncation goes below zero
        for layer in (model[0], model[4]):
            give_stddev(layer, (2 * torch.randn(layer.weight.shape, dtype=D) - 3).exp())
    model.eval()
    before = snapshot(model)
    cut = sb.analysis.truncate(model, rank, floor=1e-3)
    assert_same(before, model)
    for name in ("0", "4", "6"):
        sigma = sb.analysis.matrices(model)[name].stddev.numpy()
        a, gamma, b = np.linalg.svd(sigma, full_matrices=False)
        expected = np.maximum(a[:, :rank] * gamma[:rank] @ b[:rank], 1e-3)
        assert np.abs(sb.analysis.matrices(cut)[name].stddev.numpy() - expected).max() < 1e-13 * gamma[0]
        if name != "6" and rank > 1:
            assert (expected == 1e-3).any()
    changed = [name for name, value in cut.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == [
        f"{name}.bayes.weight.rho" for name in ("0", "4", "6")[: 2 if rank == 3 else 3]
    ]  # 6 has rank 3
    assert not any(module.training for module in cut.modules())
    assert [(r.name, r.method) for r in sb.summary(cut).rows] == [
        (r.name, r.method) for r in sb.summary(model).rows
    ]
    assert cut[4].bayes.estimator == "flipout" and cut[4].bayes.prior == sb.Normal(0.0, 1.0)


def test_rank_one_of_a_positive_matrix_is_positive():
    """Perron: the leading singular vectors of a positive matrix have one sign, so that nothing is clipped."""
    sigma = (3 * torch.randn(50, 30, dtype=D, generator=torch.Generator().manual_seed(0))).exp()
    assert sb.analysis.low_rank(sigma, 1).min() > 0 > sb.analysis.low_rank(sigma, 2).min()


def test_truncation_at_the_edges():
    model = mean_field(dense, sb.MeanField.paper(stddev_init=0.05, stddev_max=0.055))
    assert_same(snapshot(model), sb.analysis.truncate(model, 12))
    one = sb.analysis.truncate(model, 1, include=nn.Linear, exclude=["0", "2"])
    changed = [
        name for name, value in one.state_dict().items() if not torch.equal(value, model.state_dict()[name])
    ]
    assert changed == ["4.bayes.weight.rho"] and one[4].bayes.weight.maximum == 0.055
    give_stddev(model[0], planted(12, 9, 1))
    low = sb.analysis.matrices(sb.analysis.truncate(model, 9, floor=1e-2))["0"].stddev
    assert float(low.min()) == pytest.approx(1e-2) and float(low.max()) <= 0.055
    with torch.no_grad():
        model[0].bayes.weight.rho.fill_(-100.0)
    least = sb.analysis.matrices(sb.analysis.truncate(model, 1))["0"].stddev
    assert torch.allclose(least, torch.full_like(least, 1e-7), rtol=1e-4)  # as the page says
    for rank in (0, -1, 1.5, True, "2", None):
        for change in (sb.analysis.truncate, sb.compress):
            with pytest.raises(ValueError, match="rank must be an integer of at least 1"):
                change(model, rank)
    with pytest.raises(ValueError, match="floor must be positive"):
        sb.analysis.truncate(model, 1, floor=0.0)


def test_tied_kl_is_the_divergence_of_two_normals():
    sigma = planted(7, 5, 3)
    log_u, log_v = torch.randn(7, 2, dtype=D), torch.randn(5, 2, dtype=D) - 4.0
    q, p = Normal(0.0, log_u.exp() @ log_v.exp().t()), Normal(0.0, sigma)
    assert torch.allclose(tied_kl(sigma, log_u, log_v), kl_divergence(q, p).sum())


@pytest.mark.parametrize(
    ("shape", "rank"), [((30, 20), 1), ((30, 20), 2), ((40, 24), 3), ((5, 1), 1), ((1, 1), 1)]
)
def test_factors_of_a_low_rank_matrix_are_found(shape, rank):
    sigma = planted(*shape, rank)
    for tried in (rank, rank + 1):
        log_u, log_v = factorize(sigma, tried)
        assert (log_u.shape, log_v.shape) == ((shape[0], tried), (shape[1], tried))
        assert torch.allclose(log_u.exp() @ log_v.exp().t() / sigma, torch.ones_like(sigma), atol=2e-3)
        assert torch.allclose(log_u.mean(0), log_v.mean(0))
        if tried > 1:  # two equal components would get equal gradients for ever
            assert all(not torch.allclose(log_u[:, 0], log_u[:, c], atol=1e-3) for c in range(1, tried))


def test_factors_are_the_closest_found_and_a_larger_rank_is_never_worse():
    random = torch.Generator().manual_seed(0)
    sigma = planted(40, 24, 3) * torch.randn(40, 24, dtype=D, generator=random).mul(0.3).exp()
    state = torch.get_rng_state()
    found = [factorize(sigma, rank) for rank in range(1, 5)]
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(found[2], factorize(sigma, 3), strict=True))
    divergences = [float(tied_kl(sigma, *factors)) for factors in found]
    assert all(after < before for before, after in itertools.pairwise(divergences))
    ratio = (found[0][0] + found[0][1].t()).exp() / sigma  # rank 1 is convex: a zero gradient is the minimum
    assert torch.allclose(ratio.square().mean(0), torch.ones(24, dtype=D))
    assert torch.allclose(ratio.square().mean(1), torch.ones(40, dtype=D))
    for rank, divergence in enumerate(divergences[:3], 1):
        cut = Normal(0.0, sb.analysis.low_rank(sigma, rank).clamp_min(1e-7))
        assert divergence < float(kl_divergence(cut, Normal(0.0, sigma)).sum())
        log_u, log_v = (factor.clone().requires_grad_() for factor in found[rank - 1])
        gradients = torch.autograd.grad(tied_kl(sigma, log_u, log_v), (log_u, log_v))
        assert max(float(gradient.abs().max()) for gradient in gradients) < 0.05


def test_factors_of_many_powers_of_ten():
    """Zeros in all but name: a line search may overflow there, and entries of U and V go to nothing."""
    random = torch.Generator().manual_seed(2)
    torch.randint(
        1, 40, (2,), generator=random
    )  # the numbers after these make an entry of U underflow at rank 4
    sigma = torch.where(torch.randn(19, 10, dtype=D, generator=random) > 1.0, 1e-7, 0.3)
    divergences = []
    for rank in range(1, 5):
        factors = factorize(sigma, rank)
        assert all(torch.isfinite(factor.float()).all() for factor in factors)
        divergences.append(float(tied_kl(sigma, *factors)))
    assert all(after < before for before, after in itertools.pairwise(divergences))


@pytest.mark.parametrize("estimator", ["shared", "flipout", "local"])
@pytest.mark.parametrize("build", [dense, convnet])
def test_a_compressed_model_of_the_true_rank_gives_the_same_draws(build, estimator):
    model = mean_field(
        build, sb.MeanField.paper(prior=sb.Normal(0.0, 0.3), estimator=estimator), rank=2
    ).eval()
    before = snapshot(model)
    small = sb.compress(model, 2)
    assert_same(before, model)
    x = torch.randn(5, 2, 6, 6) if build is convnet else torch.randn(5, 9)
    assert torch.allclose(
        sb.draw(small, x, samples=4, seed=3), sb.draw(model, x, samples=4, seed=3), atol=1e-4
    )
    ours, theirs = sb.predict(small, x, samples=8, seed=1).mean, sb.predict(model, x, samples=8, seed=1).mean
    assert torch.allclose(ours, theirs, atol=1e-4)
    assert torch.allclose(sb.kl(small), sb.kl(model), rtol=1e-4)
    assert not any(module.training for module in small.modules())


def test_a_compressed_model_is_what_ktied_makes(tmp_path):
    model = mean_field(
        convnet, sb.MeanField.paper(prior=sb.HeNormal(), stddev_init=0.05, estimator="flipout")
    )
    small = sb.compress(model, 3)
    straight = sb.bayesianize(
        convnet(), sb.KTied.paper(rank=3, prior=sb.HeNormal(), stddev_init=0.05, estimator="flipout")
    )
    assert str(sb.summary(small)) == str(sb.summary(straight))
    shapes = [{name: value.shape for name, value in m.state_dict().items()} for m in (small, straight)]
    assert shapes[0] == shapes[1]
    for name, value in small.state_dict().items():
        if name in model.state_dict():
            assert torch.equal(value, model.state_dict()[name])
    sb.save(small, tmp_path / "small.safetensors")
    again = sb.load(convnet(), tmp_path / "small.safetensors")
    assert_same(snapshot(small), again)
    sb.load(straight, tmp_path / "small.safetensors")
    x, y = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 0, 1])
    for other in (again, straight, copy.deepcopy(small)):
        assert torch.equal(sb.draw(other.eval(), x, seed=0), sb.draw(small.eval(), x, seed=0))
        assert torch.equal(sb.kl(other), sb.kl(small))
    groups = [sb.parameter_groups(m, lr=0.1, weight_decay=1e-4) for m in (small, straight)]
    for ours, theirs in zip(*groups, strict=True):
        assert ours["name"] == theirs["name"] and len(ours["params"]) == len(theirs["params"])
    optimizer = torch.optim.Adam(small.train().parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = sb.elbo(sb.draw(small, x), y, small, num_data=100).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in small.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.uncounted
def test_a_compressed_model_compiles():
    model = sb.compress(mean_field(dense), 2)
    x, y = torch.randn(5, 9), torch.zeros(5, dtype=torch.long)

    def loss(x):
        return sb.elbo(sb.draw(model, x, noise="mean"), y, model, num_data=100).loss

    assert torch.allclose(torch.compile(loss, backend="eager", fullgraph=True)(x), loss(x))
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(sb.analysis.matrices(compiled)["0"].stddev, sb.analysis.matrices(model)["0"].stddev)
    assert type(sb.compress(torch.compile(mean_field(dense), backend="eager"), 1)) is nn.Sequential


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_counts_are_the_papers(rank):
    for build, include, counts in (
        (models.MLP, None, (481_614, 484_008, 486_402)),
        (models.LeNet, nn.Linear, (2_262_188, 2_267_408, 2_272_628)),
    ):
        model = sb.bayesianize(build(), sb.MeanField.paper())
        for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
            nn.init.constant_(layer.bayes.weight.rho, -4.0)  # of rank 1: found at once
        small = sb.compress(model, rank, include=include)
        assert sb.summary(small).parameters == counts[rank - 1]


def test_mixed_rules_and_selections(tmp_path):
    rules = [
        ("^0$", sb.MeanField.paper(prior=sb.Normal(0.0, 0.2))),
        ("^1$", sb.MeanField.paper()),
        (nn.Linear, sb.MeanField.paper()),
    ]
    model = mean_field(convnet, rules)
    small = sb.compress(model, 2, include=nn.Linear, exclude="^6$")
    small = sb.compress(small, 1, include=lambda name, layer: isinstance(layer, nn.Conv2d))
    methods = [(row.name, row.method) for row in sb.summary(small).rows]
    assert methods == [("0", "KTied"), ("1", "MeanField"), ("4", "KTied"), ("6", "MeanField")]
    record = small._slimbayes
    assert [record.methods[record.layers[name]].prior.scale for name in ("0", "4", "6")] == [0.2, 1.0, 1.0]
    assert [small[i].bayes.weight.log_u.shape[1] for i in (0, 4)] == [1, 2]
    assert small[6].bayes.weight.rho.shape == (3, 12)
    sb.save(small, tmp_path / "mixed.safetensors")
    again = sb.load(convnet(), tmp_path / "mixed.safetensors")
    x = torch.randn(5, 2, 6, 6)
    assert_same(snapshot(small), again)
    assert torch.equal(sb.draw(again.eval(), x, seed=0), sb.draw(small.eval(), x, seed=0))
    assert torch.equal(sb.kl(again), sb.kl(small))
    outer = nn.ModuleDict({"inner": mean_field(dense)})  # converted inside a larger model
    assert [row.method for row in sb.summary(sb.compress(outer, 1)).rows] == ["KTied"] * 3


def test_tied_weights_are_changed_once(tmp_path):
    model = sb.bayesianize(Tied(), sb.MeanField.paper(), include=["table", "inner"])
    give_stddev(model.table, planted(11, 5, 2))
    for include in (None, "table", "head"):
        small = sb.compress(model, 2, include=include)
        assert small.table.bayes.weight is small.head.bayes.weight
        assert small.table.weight is small.head.weight
        inner = 5 * 5 + 2 * 10 if include is None else 2 * 5 * 5
        assert sb.summary(small).parameters == 11 * 5 + 2 * 16 + inner + 2 * 5
        cut = sb.analysis.truncate(model, 1, include=include)
        assert cut.table.bayes.weight is cut.head.bayes.weight
        assert float(sb.analysis.spectrum(cut)["head"]["stddev"][0]) == pytest.approx(1.0, abs=1e-9)
    sb.save(small, tmp_path / "tied.safetensors")
    again = sb.load(Tied(), tmp_path / "tied.safetensors")
    x = torch.arange(8).reshape(2, 4)
    assert torch.equal(sb.draw(again, x, seed=0), sb.draw(small, x, seed=0))
    assert torch.allclose(sb.draw(model, x, seed=0), sb.draw(small, x, seed=0), atol=1e-4)
    for change in (sb.compress, sb.analysis.truncate):
        with pytest.raises(ValueError, match="'table' and 'head' share one weight"):
            change(model, 1, exclude=iter(["head"]))


def test_caps_are_dropped_with_a_word(recwarn, tmp_path):
    model = mean_field(dense, sb.MeanField.paper(stddev_init=0.05, stddev_max=0.06), rank=2)
    with torch.no_grad():
        model[0].bayes.bias.rho.fill_(1.0)  # far over the cap
    give_stddev(model[0], torch.full((12, 9), 0.5))
    give_stddev(model[2], torch.full((7, 12), 0.03))
    model[2].bayes.weight.rho.requires_grad_(False)
    small = sb.compress(model, 1, include="[02]")
    assert not recwarn.list
    assert torch.allclose(sb.analysis.matrices(small)["0"].stddev, torch.tensor(0.06))
    assert torch.allclose(small[0].bayes.bias(small[0].bias).scale, torch.tensor(0.06))
    assert small[0].bayes.bias.maximum is None and small[4].bayes.bias.maximum == 0.06
    assert not small[2].bayes.weight.log_u.requires_grad and small[0].bayes.weight.log_v.requires_grad
    sb.save(small, tmp_path / "capped.safetensors")
    again = sb.load(dense(), tmp_path / "capped.safetensors")
    x = torch.randn(4, 9)
    assert torch.equal(sb.draw(again, x, seed=0), sb.draw(small, x, seed=0))
    give_stddev(model[0], 0.005 + 0.05 * torch.eye(12, 9))
    give_stddev(model[4], torch.tensor([[0.06] * 6 + [0.001], [0.06] * 7, [0.02] * 7]))
    with pytest.warns(
        UserWarning, match=r"no stddev_max, and the largest σ is now above the cap in '4' \(0\.\d+ over"
    ):
        sb.compress(model, 1)


def test_what_cannot_be_compressed_says_why():
    for method, what in (
        (sb.MeanField.paper(tied_mean=True), "layer '0' has tied_mean=True"),
        (sb.MeanField.paper(prior=sb.Cauchy(0.0, 1.0)), "layer '0' has prior=Cauchy"),
    ):
        model = mean_field(dense, method)
        with pytest.raises(ValueError, match=what + ".*exclude='0'"):
            sb.compress(model, 1)
    for method in (sb.Rank1.paper(), sb.KTied.paper(), sb.DropConnect()):
        model = sb.bayesianize(dense(), method)
        with pytest.raises(ValueError, match=r"no weight matrix with the Normal posterior of sb.MeanField;"):
            sb.compress(model, 1)
        if not isinstance(method, sb.KTied):
            with pytest.raises(ValueError, match=r"Normal posterior of sb.MeanField or sb.KTied"):
                sb.analysis.matrices(model)
    with pytest.raises(ValueError, match="has not been converted"):
        sb.compress(dense(), 1)
    model = mean_field(dense)
    with pytest.raises(ValueError, match=r"include='conv' matches no layer; the layers are: 0 \(Linear\), 2"):
        sb.compress(model, 1, include="conv")
    with pytest.raises(ValueError, match=r"exclude=<class .*Conv2d'> matches no layer"):
        sb.compress(model, 1, exclude=nn.Conv2d)
    with pytest.raises(ValueError, match=r"exclude='.' leaves no layer"):
        sb.compress(model, 1, exclude=".")
    nn.init.constant_(model[2].bayes.weight.rho, torch.nan)
    for change in (sb.compress, sb.analysis.truncate):
        with pytest.raises(ValueError, match="layer '2': the matrix has entries that are not finite"):
            change(model, 1)

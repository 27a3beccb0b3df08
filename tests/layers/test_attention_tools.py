"""Attention layers with everything around them: checkpoints, analyses, compiled code, torch's transformers."""

import copy
import pickle

import pytest
import torch
from helpers_networks import quiet
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import converted_layers, find_record

METHODS = {
    "rank1": sb.Rank1(components=2),
    "batch_ensemble": sb.BatchEnsemble(components=2),
    "meanfield": sb.MeanField(biases=True),
    "flipout": sb.MeanField(biases=True, estimator="flipout"),
    "ktied": sb.KTied(biases=True),
    "ktied_local": sb.KTied(biases=True, estimator="local"),
    "emp": sb.EMP(patch=("attention", "output"), init_noise=0.1),
    "ecmp": sb.ECMP(patch=("attention", "output"), init_noise=0.1, learn_mixing=True),
    "dropout": sb.MCDropout(),
    "drop_connect": sb.DropConnect(),
}
SIZE, BATCH = 4, 4


class Net(nn.Module):
    """Words, an attention layer and a head: classes of a sentence."""

    def __init__(self, **options):
        super().__init__()
        self.words = nn.Embedding(7, SIZE)
        self.attention = nn.MultiheadAttention(SIZE, 2, batch_first=True, **options)
        self.head = nn.Linear(SIZE, 2)

    def forward(self, words):
        x = self.words(words)
        y, _ = self.attention(x, x[..., : self.attention.kdim], x, key_padding_mask=words == 0)
        return self.head(y.mean(1))


def words(batch=BATCH):
    found = torch.randint(7, (batch, 5), generator=torch.Generator().manual_seed(0))
    found[:, 0] = 1
    return found


def converted(method, **options):
    torch.manual_seed(0)
    return sb.bayesianize(Net(**options), METHODS[method])


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"kdim": 3}], ids=["packed", "separate"])
def test_checkpoints(method, options, tmp_path):
    before = {name: p.clone() for name, p in Net(**options).state_dict().items()}
    model = converted(method, **options)
    assert set(before) <= set(model.state_dict())
    model.load_state_dict(before, strict=False)  # from before the conversion: expanded to all components
    for name, saved in before.items():
        now = model.state_dict()[name]
        assert torch.equal(now, saved.expand_as(now))
    sb.save(model, tmp_path / "net")
    again = sb.load(Net(**options), tmp_path / "net")
    for twin in (again, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        for noise in ("example", "shared", "mean"):
            a, b = (sb.draw(m, words(), samples=2, seed=1, noise=noise) for m in (model, twin))
            assert torch.equal(a, b)
        assert [n for n, _ in converted_layers(twin)] == [n for n, _ in converted_layers(model)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("options", [{}, {"kdim": 3, "add_bias_kv": True}], ids=["packed", "separate"])
def test_one_training_step(method, options):
    """Every parameter has a gradient, and the groups of the optimizer hold each once."""
    model = converted(method, **options)
    groups = sb.parameter_groups(model, lr=0.1, weight_decay=0.1)
    sb.elbo(sb.draw(model, words(), samples=6), torch.zeros(BATCH).long(), model, num_data=50).loss.backward()
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in model.parameters()}
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    means = method in ("meanfield", "flipout", "ktied", "ktied_local")
    for p in (
        model.attention.out_proj.weight,
        model.attention.kernels[0].weight,
        model.attention.in_proj_bias,
    ):
        assert (id(p) in decayed) == (not means)
    assert not any(id(p) in decayed for name, p in model.named_parameters() if ".bayes." in name)
    torch.optim.SGD(groups).step()


def test_names_and_analyses(tmp_path):
    model = converted("meanfield")
    rows = {row.name: row for row in sb.summary(model).rows}
    assert rows["attention"].layer == "MultiheadAttention"
    assert rows["attention"].parameters == 2 * rows["attention"].base_parameters
    assert [name for name, _ in converted_layers(model)] == ["attention.qkv", "attention.out", "head"]
    names = [name for name, _ in converted_layers(converted("meanfield", kdim=3))]
    assert names == [*[f"attention.{key}" for key in ("q", "k", "v", "out")], "head"]
    assert not [row for row in sb.summary(model).left_alone if row[0].startswith("attention")]
    shapes = {name: tuple(w.stddev.shape) for name, w in sb.analysis.matrices(model).items()}
    assert shapes["attention.qkv"] == (SIZE, 3 * SIZE) and shapes["attention.out"] == (SIZE, SIZE)
    only = sb.analysis.matrices(model, include=nn.MultiheadAttention)
    assert set(only) == {"attention.qkv", "attention.out"}
    spread = sb.analysis.component_spread(converted("rank1"))
    assert set(spread) == {"attention.qkv", "attention.out", "head"}
    tied = sb.compress(model, rank=2)
    assert torch.equal(sb.draw(tied, words(), noise="mean"), sb.draw(model, words(), noise="mean"))
    assert {type(m).__name__ for m in find_record(tied).methods} == {"KTied"}
    sb.save(tied, tmp_path / "tied")
    again = sb.load(Net(), tmp_path / "tied")
    assert torch.equal(sb.draw(again, words(), seed=1), sb.draw(tied, words(), seed=1))


def test_tied_layers_share_one_posterior():
    net = nn.ModuleDict({name: nn.MultiheadAttention(SIZE, 2) for name in ("a", "b", "c")})
    net["b"].out_proj.weight = net["a"].out_proj.weight
    model = sb.bayesianize(net, sb.MeanField(), include="^a$")
    assert set(find_record(model).layers) == {"a", "b"}  # what shares a random weight follows
    first, second = (model[name].kernels[1].bayes for name in ("a", "b"))
    assert first.weight is second.weight and first.weight_source == second.weight_source


class Two(nn.Module):
    """Two attention layers with one projection out, which is a Linear that nobody calls."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.MultiheadAttention(SIZE, 2, batch_first=True) for _ in range(2))
        self.b.out_proj = self.a.out_proj = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        for layer in (self.a, self.b):
            x = layer(x, x, x, need_weights=False)[0]
        return x


@pytest.mark.parametrize(
    "method", [sb.Rank1(components=2), sb.MeanField(), sb.EMP(patch=("a", "b"))], ids=str
)
def test_a_projection_that_layers_share_grows_once(method):
    before = Two().state_dict()
    model = sb.bayesianize(Two(), method)
    first, second = (layer.kernels[1] for layer in (model.a, model.b))
    assert first.weight is second.weight and first.bias is second.bias and type(model.a.out_proj) is nn.Linear
    assert first.bias.dim() == (1 if isinstance(method, sb.MeanField) else 2)
    if not isinstance(method, sb.Rank1):
        assert first.bayes.weight_source == second.bayes.weight_source
    assert not model.load_state_dict(before, strict=False, assign=True).unexpected_keys
    sb.draw(model, torch.randn(3, 5, SIZE), samples=2).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_projection_cannot_be_selected_by_itself():
    for method in (sb.MeanField(), sb.DeepEnsemble(members=2)):
        for net in (Two(), Net()):
            with pytest.raises((TypeError, ValueError), match=r"matches no layer|never calls it"):
                sb.bayesianize(net, method, include="out_proj")


def test_predictions_and_scores():
    model = converted("rank1")
    found = sb.predict(model, words(), samples=3, seed=1)
    assert found.mean.shape == (BATCH, 2) and (found.mutual_information > 0).all()
    scores = sb.evaluate(model, [(words(), torch.zeros(BATCH).long())], samples=2, seed=1)
    assert 0 <= scores["accuracy"] <= 1
    torch.manual_seed(0)
    members = sb.bayesianize(Net(), sb.DeepEnsemble(members=3))
    draws = sb.draw(members, words())
    assert draws.shape == (3, BATCH, 2) and not torch.allclose(draws[0], draws[1])


@pytest.mark.parametrize("method", ["rank1", "meanfield", "flipout", "ktied_local"])
def test_autocast(method):
    for options in ({}, {"kdim": 3, "add_bias_kv": True}):
        model = converted(method, **options)
        for noise in ("example", "shared", "mean"):
            with torch.autocast("cpu", torch.bfloat16):
                low = sb.draw(model, words(), samples=2, seed=1, noise=noise)
            low.float().sum().backward()
            whole = sb.draw(model, words(), samples=2, seed=1, noise=noise)
            torch.testing.assert_close(low.float(), whole, rtol=0.1, atol=0.05)


# torch's transformers


def transformer(**options):
    torch.manual_seed(0)
    with quiet():
        return nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True, **options).eval()


def encoder(layers=2, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0, **options)
    with quiet():
        return nn.TransformerEncoder(layer, layers).eval()


UNIT = sb.Rank1(components=2, random_sign_init=1.0, dropout_rate=0.2)  # at the mean the plain network
PADDING = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"bias": False}], ids=str
)
def test_encoders_in_eval_mode_are_torchs_own(options, grad):
    """Attention alone is converted: torch's fused path would not call it. Padded positions have no meaning."""
    plain = encoder(**options)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    padding = torch.zeros(3, 5).masked_fill(PADDING, -torch.inf)
    calls = (
        {},
        {"src_key_padding_mask": PADDING},
        {"mask": causal, "is_causal": True},
        {"mask": causal, "src_key_padding_mask": padding},
    )
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    for method in (sb.MeanField(stddev_init=0.3), UNIT):
        with quiet():
            model = sb.bayesianize(copy.deepcopy(plain), method, include=nn.MultiheadAttention)
        for call in calls:
            with torch.set_grad_enabled(grad), quiet():
                found = sb.draw(model, x, noise="mean", **call)
                expected = plain(x, **call)
                noisy = sb.draw(model, x, samples=2, **call)
            real = ~PADDING if "src_key_padding_mask" in call else torch.ones_like(PADDING)
            torch.testing.assert_close(
                found[:, real], expected[real].expand_as(found[:, real]), rtol=1e-5, atol=1e-5
            )
            assert not torch.isclose(noisy[0][real], noisy[1][real]).all(-1).any()


@pytest.mark.parametrize("grad", [False, True])
def test_whole_transformers_are_torchs_own(grad):
    plain = transformer()
    torch.manual_seed(1)
    source, target = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    call = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(4),
        "tgt_is_causal": True,
        "src_key_padding_mask": PADDING,
        "memory_key_padding_mask": PADDING,
    }
    for method in (sb.MeanField(stddev_init=0.3), UNIT, sb.MCDropout(rate=0.3)):
        with quiet():
            model = sb.bayesianize(copy.deepcopy(plain), method)
        kinds = [layer.kind for _, layer in converted_layers(model) if hasattr(layer, "kind")]
        assert len(kinds) == 6  # two kernels of three layers
        with torch.set_grad_enabled(grad), quiet():
            found = sb.draw(model, source, target, noise="mean", **call)
            expected = plain(source, target, **call)
            noisy = sb.draw(model, source, target, samples=2, seed=1, **call)
            if not grad:
                with sb.fast_paths(late=False):
                    torch.testing.assert_close(
                        sb.draw(model, source, target, samples=2, seed=1, **call), noisy
                    )
        torch.testing.assert_close(found, expected.expand_as(found), rtol=1e-5, atol=1e-5)
        assert not torch.isclose(noisy[0], noisy[1]).all(-1).any()


@pytest.mark.uncounted
def test_a_compiled_draw_is_one_graph():
    torch._dynamo.reset()
    model = sb.bayesianize(encoder(1), sb.Rank1(components=2, dropout_rate=1e-12)).train()  # σ of 1e-6
    x = torch.randn(3, 5, 8)
    draws = torch.compile(lambda x: sb.draw(model, x), backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(draws, sb.draw(model, x, noise="mean"), rtol=1e-3, atol=1e-3)
    assert not torch.equal(draws, sb.draw(model, x, noise="mean"))
    draws.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch._dynamo.reset()


def test_an_exported_program_draws_at_every_call():
    class Drawn(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = converted("meanfield").eval()

        def forward(self, words):
            return sb.draw(self.model, words, samples=2)

    with torch.no_grad():
        program = torch.export.export(Drawn(), (words(),)).module()
        assert program(words()).shape == (2, BATCH, 2) and not torch.equal(program(words()), program(words()))


@torch.no_grad()
def test_a_converted_layer_inside_a_plain_one_keeps_its_noise():
    """torch's fused path of an encoder layer that was built around it would read the weights by itself."""
    torch.manual_seed(0)
    outer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    outer.self_attn = sb.bayesianize(
        nn.MultiheadAttention(8, 2, batch_first=True), sb.Rank1(components=1, dropout_rate=0.2)
    ).eval()
    x = torch.randn(3, 4, 8)
    assert not torch.equal(outer(x), outer(x))
    assert not torch.equal(
        nn.TransformerEncoder(outer, 1).eval()(x), nn.TransformerEncoder(outer, 1).eval()(x)
    )

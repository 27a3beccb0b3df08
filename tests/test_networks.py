"""Whole networks: residual, nested, tied, repeated, folding, transformers, several inputs and outputs."""

import copy

import pytest
import torch
from helpers_networks import (
    METHODS,
    NOISELESS,
    convert,
    features,
    images,
    mlp,
    quiet,
    residual_net,
    trained_step,
    unit_factors,
)
from torch import nn

import slimbayes as sb

RANDOM_WEIGHTS = ["meanfield", "ktied", "drop_connect", "emp_linear", "ecmp_linear"]


def chosen(method):
    patch = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)
    extra = {
        "emp_linear": lambda: sb.EMP.paper(components=3, patch=patch, init_noise=0.3),
        "ecmp_linear": lambda: sb.ECMP.paper(components=3, patch=patch, init_noise=0.3),
    }
    return {**METHODS, **extra}[method]()


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Residual networks


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("method", METHODS)
def test_residual_network(method, mode):
    """At the mean the plain network on the tiled rows; one step moves every parameter and stays finite."""
    torch.manual_seed(0)
    plain = residual_net()
    plain[2][2].p = 0.0
    model = sb.bayesianize(copy.deepcopy(plain), METHODS[method]())
    getattr(plain, mode)()
    getattr(model, mode)()
    components = METHODS[method]().traits.components
    if method not in ("lognormal", "additive", "emp", "ecmp"):
        unit_factors(model)
        draws = sb.draw(model, images(), noise="mean")
        expected = plain(images())
        for draw in draws if method != "deep_ensemble" else draws[:1]:
            close(draw, expected)
        if mode == "train" and method != "deep_ensemble":  # one set of statistics, over all rows
            rows = images().repeat(components, 1, 1, 1)
            again = copy.deepcopy(residual_net())
            again.load_state_dict(plain.state_dict())
            norm = model[1][0].norm
            assert int(norm.num_batches_tracked) == 1
            close(norm.running_var, 0.9 + 0.1 * plain[0](rows).var((0, 2, 3)))
    changed, _ = trained_step(model, (images(),), torch.tensor([0, 1, 2, 0]), samples=2)
    assert changed == {name for name, _ in model.named_parameters()}


def test_nested_containers():
    class Block(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            self.named = nn.ModuleDict({"inner": Block(depth - 1)} if depth else {"leaf": nn.Linear(3, 3)})

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            for module in self.named.values():
                x = module(x)
            return x

    model = sb.bayesianize(
        nn.Sequential(nn.Sequential(Block(3)), nn.Sequential()), sb.Rank1.paper(components=2)
    )
    names = [row.name for row in sb.summary(model).rows]
    assert len(names) == 2 * 4 + 1
    assert names[-1] == "0.0.named.inner.named.inner.named.inner.named.leaf"
    assert sb.draw(model, features()).shape == (2, 4, 3)


# Tied weights, and one module used twice


class Tied(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return torch.stack([self.a(x), self.b(x)], 1)  # [B, 2, 4]


@pytest.mark.parametrize("method", RANDOM_WEIGHTS)
def test_tied_weights_share_one_posterior_and_one_sample(method):
    model = convert(Tied, chosen(method))
    assert model.a.weight is model.b.weight
    # Biases are equal at zero input; differences of outputs are the weight's alone.
    x = torch.cat([torch.zeros(1, 4), torch.eye(4)])
    for noise in ("shared", "example"):
        draws = sb.draw(model, x, samples=8, noise=noise, seed=2)  # [8, 5, 2, 4]
        weights = draws[:, 1:] - draws[:, :1]  # [8, 4, 2, 4]
        close(weights[:, :, 0], weights[:, :, 1])
        assert weights.std(0).max() > 1e-2
        if method not in ("emp_linear", "ecmp_linear", "drop_connect"):
            assert (draws[:, 0, 0] - draws[:, 0, 1]).abs().max() > 1e-3  # untied biases, sampled apart


def test_tied_weights_are_counted_once_in_parameters_and_kl():
    for method, spread in ((sb.MeanField.paper(), 16), (sb.KTied.paper(rank=2), 2 * (4 + 4))):
        tied = convert(Tied, method)
        assert sb.summary(tied).base_parameters == 16 + 4 + 4
        assert sb.summary(tied).parameters == 16 + 8 + spread + 8
        weight = sb.bayesianize(copy.deepcopy(convert(Tied, sb.Deterministic()).a), method)
        weight.load_state_dict({n: p for n, p in tied.a.state_dict().items()})
        other = tied.b.bayes.bias(tied.b.bias)
        prior = method.prior.scale
        bias = (other.scale**2 + other.loc**2) / (2 * prior**2) - 0.5 - (other.scale / prior).log()
        close(sb.kl(tied), sb.kl(weight) + bias.sum())


@pytest.mark.parametrize("kind", [sb.EMP, sb.ECMP])
def test_tied_patched_weights_and_their_own_biases_all_enter_the_kl(kind):
    model = convert(Tied, kind(components=3, patch=(nn.Linear,), prior_precision=2.0, init_noise=0.5))
    expected = sum(p.detach().square().sum() for p in (model.a.weight, model.a.bias, model.b.bias)) / 3
    close(sb.kl(model), expected)  # τ/2 Σ_k ‖M_k‖²/K with τ = 2
    assert (model.b.bias[0] - model.b.bias[1]).abs().max() > 1e-3  # the noise that sets components apart


@pytest.mark.parametrize("method", [*RANDOM_WEIGHTS, "local", "flipout", "rank1", "batch_ensemble"])
def test_convolution_tied_to_its_transpose(method):
    """Biases of different sizes on one weight."""

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Conv2d(2, 5, 3, padding=1)
            self.decoder = nn.ConvTranspose2d(5, 2, 3, padding=1)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(torch.relu(self.encoder(x)))

    model = convert(Autoencoder, chosen(method))
    assert model.encoder.weight is model.decoder.weight
    draws = sb.draw(model, images(), samples=2)
    assert draws.shape[1:] == images().shape
    draws.square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    assert sum(p is model.encoder.weight for p in model.parameters()) == 1


def test_tied_weights_under_factors_of_their_own():
    model = convert(Tied, sb.BatchEnsemble(components=2))
    x = features(3, 4)
    draws = sb.draw(model, x)
    for k in range(2):
        for place, layer in enumerate((model.a, model.b)):
            expected = ((x * layer.bayes.s.loc[k]) @ model.a.weight.t()) * layer.bayes.r.loc[k] + layer.bias[
                k
            ]
            close(draws[k, :, place], expected)


class Twice(nn.Module):
    """f = g ∘ g, registered under two names."""

    def __init__(self):
        super().__init__()
        self.g = nn.Linear(4, 4)
        self.same = self.g
        self.outer = nn.ModuleList([self.g])

    def forward(self, x):
        return self.outer[0](torch.tanh(self.same(x)))


@pytest.mark.parametrize("method", [m for m in [*METHODS, *RANDOM_WEIGHTS[-2:]] if m not in ("emp", "ecmp")])
def test_a_module_used_twice_is_converted_once_and_sampled_once(method):
    model = convert(Twice, chosen(method))
    if method not in ("deep_ensemble", "deterministic"):
        assert [row.name for row in sb.summary(model).rows] == ["g"]
        assert model.g is model.same is model.outer[0]
    if method in ("mc_dropout", "mc_dropout_channel"):
        return  # noise on activations, not on the function
    # Read g off its own draws at the basis vectors, then compose by hand.
    probe = torch.cat([torch.zeros(1, 4), torch.eye(4)])
    single = copy.deepcopy(model)
    single.forward = lambda x: single.g(x)
    options = {"samples": 2, "noise": "shared", "seed": 4}
    if method == "deep_ensemble":
        bias, weight = model.g.bias, model.g.weight.transpose(1, 2)
        bias, weight = (t.repeat_interleave(2, 0) for t in (bias, weight))
    else:
        values = sb.draw(single, probe, **options)
        bias, weight = values[:, 0], values[:, 1:] - values[:, :1]  # [D, 4], [D, in, out]
    x = features(3, 4)
    g = torch.tanh(x @ weight + bias[:, None])
    close(sb.draw(model, x, **options), g @ weight + bias[:, None], 2e-5)


# Networks that fold more into their rows


class Windows(nn.Module):
    """Cuts every image into 4 windows, batch outermost, and reads them with a small network."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))

    def windows(self, x):
        return x.unfold(2, 3, 3).unfold(3, 3, 3).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)  # [B·4, 2, 3, 3]

    def forward(self, x):
        y = self.mlp(torch.relu(self.conv(self.windows(x))).flatten(1))  # [B·4, 3]
        return y.unflatten(0, (-1, 4))  # [B, 4, 3]


@pytest.mark.parametrize("noise", ["example", "shared", "mean"])
@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("local", "ktied_local", "mc_dropout")])
def test_windows_of_an_example_share_its_noise(method, noise):
    """Equal to a loop over windows at a fixed seed: all windows of one example are one function."""
    model = convert(Windows, METHODS[method]()).eval()
    single = copy.deepcopy(model)
    x = images(3)
    folded = sb.draw(model, x, samples=2, noise=noise, seed=3)  # [D, 3, 4, 3]
    single.forward = lambda x: single.mlp(torch.relu(single.conv(x)).flatten(1))
    cut = model.windows(x).unflatten(0, (3, 4))
    if method == "deep_ensemble":
        single = copy.deepcopy(model)
        for place in range(4):
            alone = cut[:, place].repeat_interleave(4, 0)  # every window of the image is this one
            image = alone.unflatten(0, (3, 2, 2)).permute(0, 3, 1, 4, 2, 5).reshape(3, 2, 6, 6)
            close(sb.draw(single, image, samples=2)[:, :, place], folded[:, :, place])
        return
    for place in range(4):
        alone = sb.draw(single, cut[:, place], samples=2, noise=noise, seed=3)  # [D, 3, 3]
        close(alone, folded[:, :, place])


@pytest.mark.parametrize("method", ["local", "mc_dropout"])
def test_windows_have_activation_noise_of_their_own(method):
    model = convert(Windows, METHODS[method]()).eval()
    x = images(3)
    folded = sb.draw(model, x, samples=2, seed=3)
    split = torch.cat([sb.draw(model, x[i : i + 1], samples=2, seed=3, first_example=i) for i in range(3)], 1)
    close(split, folded, 1e-6)
    same = sb.draw(model, torch.ones(3, 2, 6, 6), samples=2, seed=3)
    assert (same[:, :, 0] - same[:, :, 1]).abs().max() > 1e-4


def test_time_steps_and_pixels_as_trailing_or_folded_axes():
    class Time(nn.Module):
        def __init__(self, fold):
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.fold = fold

        def forward(self, x):
            return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.fold else self.layer(x)

    x = torch.randn(4, 5, 3)
    for method in ("rank1", "cauchy", "batch_ensemble", "meanfield", "flipout", "ktied", "drop_connect"):
        folded = convert(lambda: Time(True), METHODS[method]())
        trailing = convert(lambda: Time(False), METHODS[method]())
        close(sb.draw(folded, x, samples=2, seed=1), sb.draw(trailing, x, samples=2, seed=1))


# torch's transformer layers, which have a fast path in eval mode


def encoder(layers=2, **options):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.3, **options)
    return nn.TransformerEncoder(layer, layers)


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True], [False] * 4 + [True]])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("padding", [False, True])
def test_encoder_fast_path_does_not_skip_converted_layers(whole, activation, padding):
    """In eval mode without gradients torch would hand the plain weights to a fused kernel."""
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    masks = {"src_key_padding_mask": PADDING} if padding else {}
    for method in ("rank1", "batch_ensemble", "meanfield", "mc_dropout", "drop_connect", "emp"):
        with quiet():
            build = encoder if whole else lambda **o: encoder(**o).layers[0]
            torch.manual_seed(0)
            plain = build(activation=activation).eval()
            model = sb.bayesianize(copy.deepcopy(plain), METHODS[method]()).eval()
        with torch.no_grad(), quiet():
            calls = []
            linear = (model.layers[0] if whole else model).linear1
            linear.register_forward_hook(lambda m, a, y, calls=calls: calls.append(1))
            draws = sb.draw(model, x, samples=2, seed=1, **masks)
            assert calls
            if method in NOISELESS:
                assert (draws[0] - draws[2]).abs().max() > 1e-2
            else:
                assert (draws[0] - draws[1]).abs().max() > 1e-3
            with torch.enable_grad():
                slow = sb.draw(model, x, samples=2, seed=1, **masks).detach()
            close(draws, slow)
            if method not in ("emp", "ecmp"):
                mean = sb.draw(unit_factors(model), x, noise="mean", **masks)
                expected = plain(x, **masks)
                if padding:  # the fast path writes zeros where it skipped, the slow one does not
                    mean, expected = mean[:, ~PADDING], expected[~PADDING]
                close(mean, expected.expand_as(mean))


def test_encoder_whose_dropout_alone_is_active_leaves_the_fast_path():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder(1)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.encoder(x))

    with quiet():
        model = sb.bayesianize(Net(), sb.MCDropout(rate=0.0), include="head").eval()
        part = sb.bayesianize(Net(), sb.DeepEnsemble(members=2), include="linear1").eval()
    with torch.no_grad(), quiet():
        first, second = sb.draw(model, torch.ones(3, 5, 8), samples=2)
        assert (first - second).abs().max() > 1e-3
        first, second = sb.draw(part, torch.ones(3, 5, 8))
        assert (first - second).abs().max() > 1e-4


def test_encoder_compiled_without_gradients():
    with quiet():
        model = convert(lambda: encoder(1), sb.Rank1.paper(components=2, dropout_rate=0.1)).eval()
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    eager = sb.draw(model, x, noise="mean").detach()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        close(sb.draw(compiled, x, noise="mean"), eager)
        first, second = sb.draw(compiled, x), sb.draw(compiled, x)
    assert (first - second).abs().max() > 1e-3
    with torch.no_grad():
        model.layers[0].linear1.bayes.r.loc.mul_(3.0)  # the factors, not only the weights, are used
        assert (sb.draw(compiled, x, noise="mean") - eager).abs().max() > 1e-2


def test_unconverted_encoder_keeps_its_fast_path():
    with quiet():
        model = sb.bayesianize(
            nn.Sequential(encoder(1), nn.Linear(8, 2)), sb.Rank1.paper(components=2), include="^1$"
        )
    assert model[0].layers[0].activation_relu_or_gelu == 1


def test_transformer_decoder_and_full_transformer():
    torch.manual_seed(0)
    with quiet():
        network = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        model = sb.bayesianize(copy.deepcopy(network), sb.Rank1.paper(components=2)).eval()
        source, target = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        with torch.no_grad():
            draws = sb.draw(model, source, target, tgt_mask=mask, noise="mean")
            assert draws.shape == (2, 3, 4, 8)
            expected = network.eval()(source, target, tgt_mask=mask)
            mean = sb.draw(unit_factors(model), source, target, tgt_mask=mask, noise="mean")
    close(mean, expected.expand_as(mean))


# Other shapes of networks


@pytest.mark.parametrize("method", ["rank1", "batch_ensemble", "meanfield", "flipout", "ktied", "emp", "ecmp",
                                    "mc_dropout", "drop_connect", "deep_ensemble"])  # fmt: skip
def test_u_net(method):
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(2, 4, 3, stride=2, padding=1)
            self.bottom = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU())
            self.up = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
            self.out = nn.Conv2d(6, 3, 1)

        def forward(self, x):
            skip = self.bottom(torch.relu(self.down(x)))
            up = self.up(skip, output_size=x.shape)
            return self.out(torch.cat([up, x], 1))

    model = convert(UNet, METHODS[method]())
    x = torch.randn(3, 2, 7, 6, generator=torch.Generator().manual_seed(3))
    draws = sb.draw(model, x, samples=2)
    assert draws.shape[1:] == (3, 3, 7, 6)
    targets = torch.randint(3, (3, 7, 6), generator=torch.Generator().manual_seed(4))
    loss = sb.elbo(draws, targets, model, num_data=10, likelihood=sb.Categorical(class_axis=1)).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    prediction = sb.predict(model, x, samples=2, likelihood=sb.Categorical(class_axis=1), chunk=5)
    close(prediction.mean.sum(1), torch.ones(3, 7, 6))


def test_several_inputs_and_outputs():
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 2)
            self.b = nn.Linear(2, 2)

        def forward(self, x, pair, *, options):
            y = self.a(x) + self.b(pair["left"]) * options["weight"][:, None]
            return {
                "out": y,
                "both": (y, [self.b(pair["right"])]),
                "per_example": y.sum(1),
                "loss": y.sum(),
                "text": "kept",
                "none": None,
            }

    model = convert(Many, sb.BatchEnsemble(components=2))
    x, left, right = features(4), features(4, 2), features(4, 2)
    weight = torch.arange(4.0)
    output = sb.draw(model, x, {"left": left, "right": right}, options={"weight": weight}, samples=3)
    assert output["out"].shape == output["both"][0].shape == output["both"][1][0].shape == (6, 4, 2)
    assert output["per_example"].shape == (6, 4)
    assert output["loss"].shape == ()
    assert (output["text"], output["none"]) == ("kept", None)
    close(output["loss"], output["out"].sum())
    k = 1
    a, b = model.a, model.b
    expected = (x * a.bayes.s.loc[k]) @ a.weight.t() * a.bayes.r.loc[k] + a.bias[k]
    inner = (left * b.bayes.s.loc[k]) @ b.weight.t() * b.bayes.r.loc[k] + b.bias[k]
    close(output["out"][3 * k], expected + inner * weight[:, None])


def test_outputs_folded_beyond_the_batch_keep_all_their_rows():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).flatten(0, 1)  # [B·T, 2]

    model = convert(Rows, sb.BatchEnsemble(components=2))
    assert sb.draw(model, torch.randn(4, 5, 3)).shape == (2, 20, 2)


@pytest.mark.parametrize("method", ["rank1", "meanfield", "emp", "deep_ensemble"])
def test_converted_backbone_inside_another_module(method):
    class Wrapper(nn.Module):
        def __init__(self, backbone):
            super().__init__()
            self.backbone = backbone
            self.head = nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.backbone(x))

    backbone = convert(mlp, METHODS[method]())
    model = Wrapper(backbone)
    for outer in (model, nn.Sequential(model)):
        draws = sb.draw(outer.eval(), features(), samples=2, seed=1)
        close(draws, model.head(sb.draw(backbone.eval(), features(), samples=2, seed=1)))
        close(sb.kl(outer), sb.kl(backbone))
        assert sb.summary(outer).parameters == sb.summary(backbone).parameters
        assert sb.predict(outer, features(), samples=2, chunk=3).mean.shape == (4, 2)
        changed, _ = trained_step(outer, (features(),), torch.tensor([0, 1, 0, 1]))
        assert any("head" in name for name in changed)
    with pytest.raises(ValueError, match=r"its module 'backbone.*' is converted already"):
        sb.bayesianize(model, sb.Rank1.paper())
    two = nn.Sequential(convert(mlp, sb.Rank1.paper()), convert(lambda: mlp(2), sb.Rank1.paper()))
    with pytest.raises(ValueError, match=r"holds several converted networks \('0', '1'\)"):
        sb.draw(two, features())


@pytest.mark.parametrize("method", ["rank1", "emp"])
def test_compiled_wrapper(method):
    model = convert(mlp, METHODS[method]())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = features()
    close(sb.draw(compiled, x, noise="mean"), sb.draw(model, x, noise="mean"))
    changed, _ = trained_step(compiled, (x,), torch.tensor([0, 1, 0, 1]))
    names = {name for name, _ in model.named_parameters()}
    changed = {name.removeprefix("_orig_mod.") for name in changed}
    assert names - changed <= {"0.bias"}  # the norm after it takes a shift of all rows away
    close(sb.kl(compiled), sb.kl(model))
    assert sb.predict(compiled, x).mean.shape == (4, 2)
    assert model.training


def test_components_per_step_follows_the_mode_of_a_compiled_model():
    model = convert(
        lambda: nn.Linear(3, 2), sb.Rank1.paper(components=3, components_per_step=1, factors="output")
    )
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert sb.draw(compiled, features(), noise="mean").shape[0] == 1
    compiled.eval()
    assert sb.draw(compiled, features(), noise="mean").shape[0] == 3


def test_deepcopy_and_state_dict_of_whole_networks():
    for method in METHODS:
        model = convert(residual_net, METHODS[method]()).eval()
        expected = sb.draw(model, images(), seed=1)
        twin = copy.deepcopy(model)
        assert torch.equal(sb.draw(twin, images(), seed=1), expected), method
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(1.0)
        assert torch.equal(sb.draw(model, images(), seed=1), expected), method
        twin.load_state_dict(model.state_dict())
        assert torch.equal(sb.draw(twin, images(), seed=1), expected), method

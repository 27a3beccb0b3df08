"""Hugging Face networks with random weights: converted, run, trained and scored by every method that fits."""

import copy

import pytest
import torch
from helpers_networks import METHODS, NOISELESS, PER_EXAMPLE, quiet, trained_step, unit_factors
from torch import nn

import slimbayes as sb
from slimbayes.core import context
from slimbayes.core.conversion import converted_layers

transformers = pytest.importorskip("transformers")

IDS = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(4, 6, dtype=torch.long).index_put(
    (torch.tensor([0, 0]), torch.tensor([4, 5])), torch.tensor(0)
)
PIXELS = torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(2))


def bert(head="BertForSequenceClassification"):
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=10, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return getattr(transformers, head)(config)


def gpt2(dropout=0.0):
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=40, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=0.0, initializer_range=0.3, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8,
        patch_size=4, num_channels=2, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.ViTForImageClassification(config)


NETWORKS = {
    "bert": (bert, {"input_ids": IDS, "attention_mask": MASK}, torch.tensor([0, 1, 2, 0])),
    "gpt2": (gpt2, {"input_ids": IDS, "attention_mask": MASK, "use_cache": False}, IDS),
    "vit": (vit, {"pixel_values": PIXELS}, torch.tensor([0, 1, 2, 0])),
}
TIED_ONLY_WHOLE = {"flipout", "local", "ktied_local"}  # these need float inputs, which a tied embedding lacks
CASES = [(network, method) for network in NETWORKS for method in METHODS]


def converted(network, method, **options):
    build, inputs, targets = NETWORKS[network]
    if network == "gpt2" and method in TIED_ONLY_WHOLE:
        options["exclude"] = "lm_head"
    return sb.bayesianize(build(), METHODS[method](), **options), inputs, targets


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize(("network", "method"), CASES)
def test_runs_trains_and_predicts(network, method):
    model, inputs, targets = converted(network, method)
    draws = METHODS[method]().traits.components * 2
    output = sb.draw(model, **inputs, samples=2)
    assert type(output).__name__.endswith(("Output", "Attentions"))
    assert output.logits.shape[:2] == (draws, 4)
    assert torch.isfinite(output.logits).all()

    changed, _ = trained_step(model, (), targets, samples=2, **inputs)
    unused = {"vit.embeddings.mask_token"}  # only used with masks
    still = {name for name, _ in model.named_parameters()} - changed - unused
    # A key's bias shifts all of a query's scores alike, so that softmax leaves it without a gradient.
    still = {name for name in still if not ("bias" in name and ("key" in name or "k_proj" in name))}
    assert not still

    model.eval()
    prediction = sb.predict(model, **inputs, samples=3, seed=4)
    assert prediction.draws.shape[:2] == (draws // 2 * 3, 4)
    total = prediction.mean.sum(-1)
    torch.testing.assert_close(total, torch.ones_like(total))
    if method not in NOISELESS:
        spread = prediction.draws.unflatten(0, (-1, 3)).std(1)
        assert float(spread.mean()) > 1e-3


@pytest.mark.uncounted(but=3)
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("network", NETWORKS)
def test_means_are_the_plain_network(network, mode):
    build, inputs, _ = NETWORKS[network]
    plain = getattr(build(), mode)()
    expected = plain(**inputs).logits
    for method in METHODS:
        if method in ("lognormal", "additive"):
            continue  # their factors have no neutral value that a fill could set
        model, _, _ = converted(network, method)
        model.load_state_dict(plain.state_dict(), strict=False)
        output = sb.draw(getattr(unit_factors(model), mode)(), **inputs, noise="mean").logits
        for draw in output if method != "deep_ensemble" else output[:1]:
            torch.testing.assert_close(draw, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
def test_seeds_survive_batch_and_sample_splits(method):
    """Masks of attention, [B, T] inputs and Conv1D layers, all at once."""
    model, inputs, _ = converted("gpt2", method)
    model.eval()
    whole = sb.draw(model, **inputs, samples=2, seed=9).logits  # [K·2, 4, T, V]
    rows = [
        sb.draw(
            model,
            input_ids=IDS[i : i + 2],
            attention_mask=MASK[i : i + 2],
            samples=2,
            seed=9,
            first_example=i,
        ).logits
        for i in (0, 2)
    ]
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-6, atol=1e-6)
    parts = [sb.draw(model, **inputs, seed=9, first_sample=i).logits for i in (0, 1)]
    torch.testing.assert_close(torch.stack(parts, 1).flatten(0, 1), whole, rtol=1e-6, atol=1e-6)
    if method in PER_EXAMPLE:
        same = sb.draw(model, input_ids=IDS[:1].expand(2, -1), seed=9).logits
        assert (same[:, 0] - same[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("network", ["bert", "gpt2"])
def test_attention_is_random_through_its_linear_layers(network):
    """Whichever way attention is computed: at the mean the plain network, and the same draws of a seed."""
    build, inputs, _ = NETWORKS[network]
    names = {"bert": r"attention\.(self\.|output\.dense)", "gpt2": r"\.attn\."}
    for method in ("rank1", "meanfield", "local"):
        found = {}
        for way in ("eager", "sdpa"):
            plain = build().eval()
            plain.set_attn_implementation(way)
            expected = plain(**inputs).logits
            torch.manual_seed(1)
            model = sb.bayesianize(plain, METHODS[method](), include=names[network]).eval()
            assert model.config._attn_implementation == way
            assert len(converted_layers(model)) == {"bert": 8, "gpt2": 4}[network]
            found[way] = sb.draw(model, **inputs, samples=2, seed=1).logits
            if method == "rank1":
                mean = sb.draw(unit_factors(model), **inputs, noise="mean").logits
                torch.testing.assert_close(mean, expected.expand_as(mean), rtol=1e-5, atol=1e-5)
            assert (found[way][0] - found[way][1]).abs().max() > 1e-3
        torch.testing.assert_close(found["eager"], found["sdpa"], rtol=1e-4, atol=1e-5)


def test_gpt2_head_and_embedding_share_one_posterior():
    plain = gpt2()
    base = sum(p.numel() for p in plain.parameters())
    model = sb.bayesianize(plain, sb.MeanField.paper(prior=sb.Normal(0.0, 1.0)))
    head, table = model.lm_head, model.transformer.wte
    assert head.weight is table.weight
    assert head.bayes.weight is table.bayes.weight
    # Weights: Conv1D [d, 3d], [d, d], [d, 4d], [4d, d] twice, with biases, and the tied [V, d] once.
    blocks = 2 * (8 * 24 + 24 + 8 * 8 + 8 + 8 * 32 + 32 + 32 * 8 + 8)
    assert sb.summary(model).parameters == base + blocks + 20 * 8
    # Its KL too: take the tied term away and compare with a model that leaves it alone.
    sigma, mean = head.bayes.weight(head.weight).scale, head.weight
    term = 0.5 * (sigma**2 + mean**2 - 1 - 2 * sigma.log()).sum()
    total = sb.kl(model)
    with torch.no_grad():
        for module in (head,):
            module.bayes.prior = None
        table.bayes.prior = None
    torch.testing.assert_close(total - sb.kl(model), term, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", ["meanfield", "ktied", "emp", "ecmp", "drop_connect"])
def test_gpt2_tied_weight_is_sampled_once_per_draw(method):
    """logits / input embeddings must use one table: the head's weight, recovered from its outputs."""
    model, _, _ = converted("gpt2", method)
    model.eval()
    ids = torch.arange(20)[:, None]  # every token once, one per row
    sb.draw(model, input_ids=ids, use_cache=False)  # the probe of the rows runs once, before the hooks
    hidden = {}
    hooks = [
        model.transformer.wte.register_forward_hook(lambda m, a, y: hidden.update(table=y)),
        model.transformer.ln_f.register_forward_hook(lambda m, a, y: hidden.update(last=y)),
    ]
    logits = sb.draw(model, input_ids=ids, samples=6, seed=1, use_cache=False).logits  # [6, 20, 1, V]
    for hook in hooks:
        hook.remove()
    table = hidden["table"].unflatten(0, (6, 20))[:, :, 0]  # [6, V, d], row v is token v's embedding
    last = hidden["last"].unflatten(0, (6, 20))[:, :, 0]  # [6, 20, d]
    torch.testing.assert_close(logits[:, :, 0], last @ table.transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert table.std(0).max() > 1e-2


def test_gpt2_estimators_that_cannot_follow_the_tie_say_so():
    with pytest.raises(
        ValueError, match=r"'lm_head' and 'transformer.wte' share one weight.*Exclude 'lm_head'"
    ):
        sb.bayesianize(gpt2(), sb.MeanField(estimator="flipout"))


def test_conv1d_is_a_linear_layer():
    model, _, _ = converted("gpt2", "rank1")
    rows = {row.name: row.layer for row in sb.summary(model).rows}
    assert rows["transformer.h.0.attn.c_attn"] == "Conv1D (transformers)"
    assert rows["lm_head"] == "Linear"
    assert len(rows) == 2 * 4 + 1
    layer = model.transformer.h[0].attn.c_attn
    assert (layer.bayes.s.loc.shape, layer.bayes.r.loc.shape) == ((3, 8), (3, 24))
    x = torch.randn(6, 5, 8)
    s, r = (f.loc.repeat_interleave(2, 0)[:, None] for f in (layer.bayes.s, layer.bayes.r))
    bias = layer.bias.repeat_interleave(2, 0)[:, None]
    with torch.no_grad():
        expected = (x * s) @ layer.weight * r + bias
        plain = sb.draw(model.eval(), input_ids=IDS, noise="mean", use_cache=False)
        assert plain.logits.shape == (3, 4, 6, 20)
        for factor in (layer.bayes.r, layer.bayes.s):
            factor.spread.rho.fill_(-40.0)  # σ = 1e-7: the layer alone, on rows tiled by hand
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["meanfield", "ktied", "emp", "ecmp", "drop_connect"])
def test_word_embeddings_can_be_included_but_position_tables_cannot(method):
    words = sb.bayesianize(bert(), METHODS[method](), include="word_embeddings")
    output = sb.draw(words, input_ids=IDS, samples=8, seed=0).logits
    assert output.std(0).max() > 1e-3
    assert [row.name for row in sb.summary(words).rows] == ["bert.embeddings.word_embeddings"]
    positions = sb.bayesianize(bert(), METHODS[method](), include=nn.Embedding, exclude="word|token_type")
    for samples, batch in ((2, 4), (1, 1)):  # one draw of one example: only the probe can tell
        with pytest.raises(sb.RowError, match=r"'bert.embeddings.position_embeddings' got an input .* is 1,"):
            sb.draw(positions, input_ids=IDS[:batch], samples=samples)
    # An explicit position per row has the row axis, so it is accepted.
    ids = torch.arange(6).expand(4, 6)
    assert sb.draw(positions, input_ids=IDS, position_ids=ids, samples=2).logits.shape == (2, 4, 3)


@pytest.mark.parametrize("network", NETWORKS)
def test_deep_ensemble_members(network):
    build, inputs, _ = NETWORKS[network]
    plain = build().eval()
    expected = plain(**inputs).logits
    members = sb.bayesianize(copy.deepcopy(plain), sb.DeepEnsemble(members=3))
    for name, parameter in members.named_parameters():
        first, *others = parameter.detach()
        assert torch.equal(first, plain.get_parameter(name).detach()), name
        random = float(first.std() if first.numel() > 1 else first.abs()) > 0.05  # not a constant start
        assert all(torch.equal(first, other) != random for other in others), name
    draws = sb.draw(members, **inputs).logits
    torch.testing.assert_close(draws[0], expected, rtol=1e-6, atol=1e-6)
    assert min((draws[i] - draws[j]).abs().max() for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-2
    copies = sb.bayesianize(plain, sb.DeepEnsemble(members=2, reinitialize=False))
    assert all(torch.equal(p[0], p[1]) for p in copies.parameters())
    torch.testing.assert_close(
        sb.draw(copies, **inputs).logits, torch.stack([expected] * 2), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("method", ["rank1", "batch_ensemble", "meanfield", "ktied", "emp", "deterministic"])
def test_cache_objects_pass_through(method):
    """Two halves of a sentence through the cache equal the whole, draw by draw."""
    model, _, _ = converted("gpt2", method)
    model.eval()
    options = {"seed": 3, "noise": "shared", "use_cache": True}
    with torch.no_grad():
        cache = transformers.DynamicCache()
        first = sb.draw(model, input_ids=IDS[:, :4], past_key_values=cache, **options)  # the probe runs here
        assert first.past_key_values is cache
        assert cache.get_seq_length() == 4
        second = sb.draw(model, input_ids=IDS[:, 4:], past_key_values=cache, **options)
        whole = sb.draw(model, input_ids=IDS, seed=3, noise="shared", use_cache=False).logits
    joined = torch.cat([first.logits, second.logits], 2)
    torch.testing.assert_close(joined, whole, rtol=1e-5, atol=1e-5)


def test_deep_ensemble_refuses_a_cache():
    """One cache cannot hold the keys of several members, and must not mix them."""
    model = sb.bayesianize(gpt2(), sb.DeepEnsemble(members=2))
    with pytest.raises(TypeError, match=r"DynamicCache.*members"):
        sb.draw(model, input_ids=IDS, past_key_values=transformers.DynamicCache())


def test_labels_give_a_scalar_loss_and_structured_outputs_keep_their_type():
    model, inputs, targets = converted("bert", "batch_ensemble")
    output = sb.draw(model, **inputs, labels=targets, output_hidden_states=True)
    assert output.loss.shape == ()
    torch.testing.assert_close(
        output.loss, nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.repeat(3))
    )
    assert isinstance(output.hidden_states, tuple)
    assert [tuple(h.shape) for h in output.hidden_states] == [(3, 4, 6, 8)] * 3
    ensemble, inputs, targets = converted("bert", "deep_ensemble")
    output = sb.draw(ensemble, **inputs, labels=targets)
    torch.testing.assert_close(
        output.loss, nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.repeat(3))
    )


def test_mc_dropout_keeps_the_networks_own_dropout_active():
    model = sb.bayesianize(gpt2(dropout=0.5), sb.MCDropout(rate=0.0)).eval()
    first, second = sb.draw(model, input_ids=IDS, samples=2).logits
    assert (first - second).abs().max() > 0.1
    plain = gpt2(dropout=0.5).eval()
    mean = sb.draw(model, input_ids=IDS, noise="mean").logits[0]
    torch.testing.assert_close(mean, plain(input_ids=IDS).logits, rtol=1e-6, atol=1e-6)


def test_a_layer_that_the_network_repeats_has_one_sample_per_draw():
    """ALBERT runs one layer three times."""
    config = transformers.AlbertConfig(
        vocab_size=20, embedding_size=6, hidden_size=8, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=10, num_labels=3, initializer_range=0.3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = sb.bayesianize(
        transformers.AlbertForSequenceClassification(config), sb.MeanField.paper(stddev_init=0.1)
    ).eval()
    draw = sb.draw(model, input_ids=IDS, seed=5).logits[0]
    with torch.no_grad():
        plain = transformers.AlbertForSequenceClassification(config).eval()
        source = dict(model.named_modules())
        for name, module in plain.named_modules():
            bayes = getattr(source[name], "bayes", None)
            if bayes is None:
                for key, parameter in module.named_parameters(recurse=False):
                    parameter.copy_(getattr(source[name], key))
                continue
            frame = context.Frame(1, 1, 1, 1, "shared", context.Draw(1, 1, 1, seed=5))
            for key, parameter in module.named_parameters(recurse=False):
                spread = getattr(bayes, key)(getattr(source[name], key))
                origin = getattr(bayes, f"{key}_source")
                noise = frame.noise_like(
                    "normal", origin, parameter.shape, parameter.dtype, parameter.device, False
                )
                parameter.copy_(spread.from_noise(noise)[0, 0, 0])
        torch.testing.assert_close(draw, plain(input_ids=IDS).logits[: len(draw)], rtol=1e-5, atol=1e-5)


def test_masked_lm_and_encoder_decoder_networks_run():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    for method in ("rank1", "meanfield", "emp", "deep_ensemble"):
        with quiet():
            t5 = sb.bayesianize(transformers.T5ForConditionalGeneration(config), METHODS[method]())
            output = sb.draw(t5, input_ids=IDS, labels=IDS, samples=2)
        assert output.logits.shape[1:] == (4, 6, 20)
        assert torch.isfinite(output.logits).all()
        masked = sb.bayesianize(bert("BertForMaskedLM"), METHODS[method]())
        changed, _ = trained_step(masked, (), IDS, input_ids=IDS)
        assert "bert.embeddings.word_embeddings.weight" in changed

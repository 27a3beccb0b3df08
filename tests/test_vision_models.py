"""torchvision's ResNet-50 and a timm ViT: networks that nobody here wrote; skipped where not installed."""

import copy

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import converted_layers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def resnet50():
    return pytest.importorskip("torchvision").models.resnet50(weights=None, num_classes=1000)


def vit():
    return pytest.importorskip("timm").create_model("vit_tiny_patch16_224", pretrained=False, num_classes=10)


NETWORKS = {"resnet50": resnet50, "vit": vit}
METHODS = {
    "rank1": sb.Rank1(components=2),
    "cauchy": sb.Rank1(components=2, posterior="cauchy"),
    "batchensemble": sb.BatchEnsemble(components=2),
    "meanfield": sb.MeanField(),
    "flipout": sb.MeanField(estimator="flipout"),
    "local": sb.MeanField(estimator="local"),
    "ktied": sb.KTied(),
    "ktied-local": sb.KTied(estimator="local"),
    "emp": sb.EMP(),
    "ecmp": sb.ECMP(),
    "mcdropout": sb.MCDropout(),
    "dropconnect": sb.DropConnect(),
    "deepensemble": sb.DeepEnsemble(members=2, reinitialize=False),
    "deterministic": sb.Deterministic(),
}


def neutral_factors(model):
    for _, layer in converted_layers(model):
        for which in ("r", "s"):
            factor = getattr(layer.bayes, which, None)
            if factor is not None:
                nn.init.ones_(factor.loc)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", METHODS)
def test_converts_trains_and_predicts(network, method):
    torch.manual_seed(0)
    plain = NETWORKS[network]().to(DEVICE).eval()
    model = sb.bayesianize(copy.deepcopy(plain), METHODS[method])
    x = torch.randn(2, 3, 224, 224, device=DEVICE)
    y = torch.tensor([1, 2], device=DEVICE)

    with torch.no_grad():
        expected = plain(x)
        kept = copy.deepcopy(model)
        neutral_factors(kept)
        at_mean = sb.draw(kept, x, noise="mean")
    scale = expected.abs().max()
    assert (at_mean - expected).abs().max() <= 2e-3 * scale  # TF32 convolutions on the GPU

    model.train()
    before = next(iter(model.parameters())).detach().clone()
    optimizer = torch.optim.SGD(sb.parameter_groups(model, lr=1e-3, weight_decay=1e-4), lr=1e-3)
    with torch.autocast(DEVICE, torch.bfloat16):
        result = sb.elbo(sb.draw(model, x), y, model, num_data=1000, kl_weight=1e-3)
    result.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(g is not None and torch.isfinite(g).all() for g in gradients.values())
    assert sum(bool(g.abs().max() > 0) for g in gradients.values()) > 0.9 * len(gradients)
    optimizer.step()
    assert not torch.equal(before, next(iter(model.parameters())))

    predictive = sb.predict(model, x, samples=3, seed=1)
    assert torch.allclose(predictive.mean.sum(-1), torch.ones(2, device=DEVICE), atol=1e-5)
    chunked = sb.predict(model, x, samples=3, seed=1, chunk=4)
    assert torch.allclose(predictive.mean, chunked.mean, atol=1e-4)


def test_parameter_counts_equal_the_papers():
    with torch.device("meta"):
        rank1 = sb.bayesianize(resnet50(), sb.Rank1(components=4))
        batch = sb.bayesianize(resnet50(), sb.BatchEnsemble(components=4))
    assert sb.summary(rank1).base_parameters == 25_557_032
    assert sb.summary(rank1).parameters == 25_977_144
    assert sb.summary(batch).parameters == 25_768_588


def test_a_torchvision_state_dict_fits_our_resnet50():
    theirs = resnet50().state_dict()
    assert sb.models.resnet50().load_state_dict(theirs).missing_keys == []

"""``slimbayes.integrations.hub``: repositories in a local folder; of the hub itself only the calls are seen."""

import json
import types

import pytest
import torch
from torch import nn

import slimbayes as sb

huggingface_hub = pytest.importorskip("huggingface_hub")
from slimbayes.integrations import hub  # noqa: E402

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module, hub.HubMixin):
    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        self.hidden, self.head = nn.Linear(4, width), nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.hidden(x).relu())


@pytest.fixture
def uploads(monkeypatch):
    """What would have been sent, as {name: bytes} by call."""
    sent = []

    class Api:
        def __init__(self, token=None, **options):
            self.token = token

        def create_repo(self, repo_id, private=None, exist_ok=False, **options):
            assert exist_ok
            return types.SimpleNamespace(repo_id=repo_id)

        def upload_folder(self, *, repo_id, folder_path, repo_type, **options):
            files = {p.name: p.read_bytes() for p in sorted(hub.Path(folder_path).rglob("*")) if p.is_file()}
            sent.append((repo_id, repo_type, self.token, files))
            return "commit"

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return sent


METHODS = [
    sb.Rank1(components=2),
    sb.DeepEnsemble(members=2),
    [("hidden", sb.KTied()), ("head", sb.MeanField(prior=sb.HeNormal()))],
]


@pytest.mark.parametrize("method", METHODS, ids=["rank1", "ensemble", "rules"])
def test_the_mixin_gives_the_same_model_back(tmp_path, method):
    model = sb.bayesianize(Net(width=6), method)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert json.loads((tmp_path / "config.json").read_text()) == {"width": 6, "classes": 3}
    again = Net.from_pretrained(tmp_path)
    assert not again.training and isinstance(again, Net)
    assert torch.equal(sb.predict(again, X, seed=0).draws, sb.predict(model, X, seed=0).draws)
    again.save_pretrained(tmp_path / "twice")
    assert (tmp_path / "twice" / "model.safetensors").read_bytes() == (
        tmp_path / "model.safetensors"
    ).read_bytes()


def test_any_network_goes_through_functions(tmp_path):
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, 3)), sb.Rank1(components=2))
    hub.save_pretrained(model, tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    assert described["architecture"] == "Sequential" and described["methods"][0]["name"] == "Rank1"
    again = hub.from_pretrained(nn.Sequential(nn.Linear(4, 3)), tmp_path)
    assert torch.equal(sb.predict(again, X, seed=0).draws, sb.predict(model, X, seed=0).draws)
    with pytest.raises(sb.CheckpointError, match="holds another architecture"):
        hub.from_pretrained(nn.Linear(4, 3), tmp_path)
    with pytest.raises(TypeError, match="got branch: it takes revision, "):
        hub.from_pretrained(nn.Linear(4, 3), tmp_path, branch="main")


def test_what_is_uploaded(uploads):
    model = sb.bayesianize(Net(), sb.Rank1(components=2))
    assert model.push_to_hub("me/mixed", token="secret") == "commit"
    assert hub.push_to_hub(model, "me/plain", private=True) == "commit"
    (name, kind, token, files), (other, _, _, plain) = uploads
    assert (name, kind, token, other) == ("me/mixed", "model", "secret", "me/plain")
    assert set(files) == set(plain) == {"README.md", "config.json", "model.safetensors"}
    assert files["model.safetensors"] == plain["model.safetensors"]
    assert 'Net.from_pretrained("me/mixed")' in files["README.md"].decode()
    assert 'from_pretrained(network, "me/plain")' in plain["README.md"].decode()


def test_the_card_says_what_the_model_is(tmp_path):
    model = sb.bayesianize(Net(), sb.Rank1(components=2, posterior="cauchy"))
    model.save_pretrained(tmp_path, model_card_kwargs={"license": "mit", "tags": ["digits"]})
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "slimbayes" and card.data.license == "mit"
    assert {"bayesian", "uncertainty", "rank1", "digits"} <= set(card.data.tags)
    assert '"posterior": "cauchy"' in card.text and str(sb.summary(model)) in card.text
    counted = sb.summary(model)
    assert f"`sb.Rank1`, {counted.parameters:,} parameters in all" in card.text


def test_a_repository_is_fetched_file_by_file(tmp_path, monkeypatch):
    model = sb.bayesianize(Net(), sb.MeanField())
    model.save_pretrained(tmp_path)
    asked = []

    def download(repo_id, filename, **options):
        asked.append((repo_id, filename, options["revision"]))
        return str(tmp_path / filename)

    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    again = Net.from_pretrained("me/net", revision="v1")
    assert torch.equal(sb.predict(again, X, seed=0).draws, sb.predict(model, X, seed=0).draws)
    hub.from_pretrained(Net(), "me/net", revision="v2")
    assert asked == [
        ("me/net", "config.json", "v1"), ("me/net", "model.safetensors", "v1"), ("me/net", "model.safetensors", "v2"),
    ]  # fmt: skip


def test_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"call sb\.bayesianize"):
        Net().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        hub.from_pretrained(Net(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(sb.CheckpointError, match="not a whole safetensors file"):
        hub.from_pretrained(Net(), tmp_path)

"""A network class that goes to the hub and comes back: safetensors, JSON and a card, in a local folder here."""

import tempfile
from pathlib import Path

import torch

import slimbayes as sb
from slimbayes.integrations.hub import HubMixin


class Classifier(torch.nn.Sequential, HubMixin):
    def __init__(self, width: int = 16):
        super().__init__(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))


def main(folder: str | None = None) -> dict[str, float]:
    place = Path(folder or tempfile.mkdtemp())
    model = sb.bayesianize(Classifier(width=32), sb.Rank1(components=4))
    model.save_pretrained(place)  # or model.push_to_hub("your-name/classifier")
    again = Classifier.from_pretrained(place)  # or ("your-name/classifier")
    x = torch.randn(8, 4)
    gap = (sb.predict(model, x, seed=0).mean - sb.predict(again, x, seed=0).mean).abs().max().item()
    print((place / "README.md").read_text())
    return {"gap": gap, "width": again[0].out_features, "files": len(list(place.iterdir()))}


if __name__ == "__main__":
    main()

"""Hugging Face Hub: converted models as repositories of safetensors and JSON, with a card that says what they are.

``HubMixin`` is for a network class of your own; ``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` are for
any network. Nothing is pickled, and loading runs no code.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

import slimbayes
from slimbayes import extras
from slimbayes.core.conversion import find_record, unwrap
from slimbayes.files import write_whole
from slimbayes.verbs.checkpoint import describe_methods, load, save
from slimbayes.verbs.summary import summary

hub = extras.need("huggingface_hub", "slimbayes.integrations.hub", "hub")

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
TAGS = ("slimbayes", "bayesian", "uncertainty", "pytorch")
Network = TypeVar("Network", bound=nn.Module)

_TEXT = """# {title}

A Bayesian neural network, made with slimbayes {version}: the network `{architecture}` of {base:,} parameters, converted
by {methods}, {parameters:,} parameters in all ({overhead:+.2f} %).

## Use

```python
{code}
prediction = sb.predict(model, inputs, samples=8)
prediction.mean                # probabilities, or the mean of real targets
prediction.mutual_information  # what the members disagree about
```

The weights are `{weights}`, one safetensors file whose header says how the network was converted. Loading it runs no
code.

## Method

```json
{options}
```

## Layers

```text
{table}
```
"""

_MIXIN = """import slimbayes as sb
from your_code import {architecture}

model = {architecture}.from_pretrained({where})"""

_FUNCTION = """import slimbayes as sb
from slimbayes.integrations.hub import from_pretrained

network = ...  # a plain {architecture}, built as the one that was converted
model = from_pretrained(network, {where})"""


class HubMixin(hub.ModelHubMixin):  # type: ignore[misc, name-defined]
    """``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` for a network class of your own.

    ``from_pretrained`` builds the class with the arguments that it was built with (they must be JSON), converts the
    network as the saved one was and gives it its weights.

    >>> import slimbayes as sb
    >>> class Net(nn.Sequential, HubMixin):
    ...     def __init__(self, width: int = 8):
    ...         super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3))
    >>> folder = tempfile.mkdtemp()
    >>> sb.bayesianize(Net(width=16), sb.Rank1(components=2)).save_pretrained(folder)
    >>> again = Net.from_pretrained(folder)
    >>> sb.summary(again).rows[0].method, again[0].out_features
    ('Rank1', 16)
    """

    def _save_pretrained(self, save_directory: Path) -> None:
        save(self, Path(save_directory) / WEIGHTS)

    @classmethod
    def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
        where = {name: options.pop(name) for name in _FETCH if name in options}
        for name in ("proxies", "resume_download"):  # older versions of the mixin hand them over
            options.pop(name, None)
        return load(cls(**options), _fetch(model_id, WEIGHTS, where)).eval()

    def generate_model_card(self, *args: Any, repo_id: str | None = None, **options: Any) -> Any:
        """The card: method, parameters, layers, and how to load it."""
        return hub.ModelCard(card(self, repo_id, _MIXIN, **options))

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload the model; as ``ModelHubMixin.push_to_hub``, with the repository's name in the card."""
        given = {"repo_id": repo_id, **(options.pop("model_card_kwargs", None) or {})}
        return super().push_to_hub(repo_id, model_card_kwargs=given, **options)


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], *, repo_id: str | None = None) -> Path:
    """Write a converted model as a repository: weights, config.json and a card; files that are there are replaced.

    >>> import slimbayes as sb
    >>> model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> sorted(path.name for path in save_pretrained(model, tempfile.mkdtemp()).iterdir())
    ['README.md', 'config.json', 'model.safetensors']
    """
    target = Path(folder)
    save(model, target / WEIGHTS)
    described = {
        "library": "slimbayes",
        "slimbayes_version": slimbayes.__version__,
        "architecture": _architecture(model),
        "methods": describe_methods(find_record(model)),
    }
    write_whole(target / CONFIG, json.dumps(described, indent=2) + "\n")
    write_whole(target / CARD, card(model, repo_id, _FUNCTION))
    return target


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    branch: str | None = None,
    create_pr: bool | None = None,
    commit_message: str = "Upload a model made with slimbayes",
) -> Any:
    """Upload a converted model to a repository, which is made where there is none; gives the commit."""
    api = hub.HfApi(token=token)
    name = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as folder:
        return api.upload_folder(
            repo_id=name,
            repo_type="model",
            folder_path=save_pretrained(model, folder, repo_id=name),
            commit_message=commit_message,
            revision=branch,
            create_pr=create_pr,
        )


def from_pretrained(network: Network, repo_or_folder: str | os.PathLike[str], **where: Any) -> Network:
    """Convert the plain ``network`` as the saved one was and give it the weights of a repository or folder.

    ``where``: ``revision``, ``cache_dir``, ``force_download``, ``local_files_only`` and ``token``, as huggingface_hub
    has them. Returns the same network, in evaluation mode.

    >>> import slimbayes as sb
    >>> folder = save_pretrained(sb.bayesianize(nn.Linear(3, 2), sb.KTied()), tempfile.mkdtemp())
    >>> sb.summary(from_pretrained(nn.Linear(3, 2), folder)).rows[0].method
    'KTied'
    """
    unknown = sorted(set(where) - set(_FETCH))
    if unknown:
        raise TypeError(f"from_pretrained got {', '.join(unknown)}: it takes {', '.join(_FETCH)}")
    return load(network, _fetch(str(repo_or_folder), WEIGHTS, where)).eval()


_FETCH = ("revision", "cache_dir", "force_download", "local_files_only", "token")


def _fetch(where: str, name: str, options: dict[str, Any]) -> Path:
    if os.path.isdir(where):
        return Path(where) / name
    return Path(hub.hf_hub_download(repo_id=where, filename=name, **options))


def card(model: nn.Module, repo_id: str | None = None, code: str = _FUNCTION, **metadata: Any) -> str:
    """The text of a model card: method, parameters, layers, and how to load it.

    >>> import slimbayes as sb
    >>> text = card(sb.bayesianize(nn.Linear(3, 2), sb.Rank1()), "me/net", license="mit")
    >>> text.splitlines()[:3], 'from_pretrained(network, "me/net")' in text
    (['---', 'library_name: slimbayes', 'license: mit'], True)
    """
    record, counted = find_record(model), summary(model)
    architecture = _architecture(model)
    names = dict.fromkeys(type(method).__name__ for method in record.methods)
    where = json.dumps(repo_id or "the repository or folder")
    tags = [*TAGS, *(name.lower() for name in names), *metadata.pop("tags", ())]
    data = hub.ModelCardData(library_name="slimbayes", tags=tags, **metadata)
    text = _TEXT.format(
        title=(repo_id or architecture).split("/")[-1],
        version=slimbayes.__version__,
        architecture=architecture,
        base=counted.base_parameters,
        parameters=counted.parameters,
        overhead=100 * counted.overhead,
        methods=" and ".join(f"`sb.{name}`" for name in names),
        code=code.format(architecture=architecture, where=where),
        weights=WEIGHTS,
        options=json.dumps(describe_methods(record), indent=1),
        table=str(counted),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def _architecture(model: nn.Module) -> str:
    return type(unwrap(model)).__name__.removeprefix("Ensembled")

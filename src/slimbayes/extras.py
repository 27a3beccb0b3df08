"""Optional packages: imported when they are used, and an error that names the extra where one is missing."""

from __future__ import annotations

import importlib
from typing import Any

_PACKAGES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "PyYAML",
}  # where the module has another name


def missing(module: str, purpose: str, extra: str) -> str:
    """What to say where a module is missing.

    >>> missing("PIL.Image", "reading images", "data")
    "reading images needs pillow: pip install 'slimbayes[data]'"
    """
    name = module.split(".")[0]
    return f"{purpose} needs {_PACKAGES.get(name, name)}: pip install 'slimbayes[{extra}]'"


def need(module: str, purpose: str, extra: str) -> Any:
    """An optional module, imported when it is used; its absence names the extra to install.

    >>> need("json", "this example", "data").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(missing(module, purpose, extra)) from error

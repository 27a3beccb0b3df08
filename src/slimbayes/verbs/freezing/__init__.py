"""Frozen models: every draw a fixed function, in plain torch modules, for serving and export."""

from slimbayes.verbs.freezing.making import freeze
from slimbayes.verbs.freezing.network import Frozen

__all__ = ["Frozen", "freeze"]

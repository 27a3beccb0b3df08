"""Frozen models: every draw a fixed function, in plain torch modules, for serving and export."""

from slimbayes.frozen.making import freeze
from slimbayes.frozen.network import Frozen

__all__ = ["Frozen", "freeze"]

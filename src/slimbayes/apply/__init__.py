"""The rules: how a sample of the random tensors enters a layer's operation. Each is written once.

A rule is a module that holds spreads and is called with an operation and its inputs. It knows nothing of
methods, and of layers only their geometry.
"""

from slimbayes.apply import opaque  # registers the operators
from slimbayes.apply.base import Operation, Rule, Slot
from slimbayes.apply.dropped import DroppedRule
from slimbayes.apply.indexed import IndexedRule, Mixing
from slimbayes.apply.rank1 import Factor, Rank1Rule
from slimbayes.apply.sampled import SampledRule

__all__ = [
    "DroppedRule",
    "Factor",
    "IndexedRule",
    "Mixing",
    "Operation",
    "Rank1Rule",
    "Rule",
    "SampledRule",
    "Slot",
    "opaque",
]

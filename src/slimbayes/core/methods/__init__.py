"""One file per family of methods; a method joins posteriors, a rule and layers."""

from slimbayes.core.methods.base import Method
from slimbayes.core.methods.dropout import DropConnect, MCDropout
from slimbayes.core.methods.ensemble import DeepEnsemble, Deterministic
from slimbayes.core.methods.meanfield import KTied, MeanField
from slimbayes.core.methods.patching import ECMP, EMP
from slimbayes.core.methods.rank1 import BatchEnsemble, Rank1

METHODS: dict[str, type[Method]] = {
    kind.__name__: kind
    for kind in (
        Rank1,
        BatchEnsemble,
        MeanField,
        KTied,
        EMP,
        ECMP,
        MCDropout,
        DropConnect,
        DeepEnsemble,
        Deterministic,
    )
}

__all__ = [
    "ECMP",
    "EMP",
    "METHODS",
    "BatchEnsemble",
    "DeepEnsemble",
    "Deterministic",
    "DropConnect",
    "KTied",
    "MCDropout",
    "MeanField",
    "Method",
    "Rank1",
]

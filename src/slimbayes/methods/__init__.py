"""One file per family of methods; a method joins posteriors, a rule and layers."""

from slimbayes.methods.base import Method
from slimbayes.methods.dropout import DropConnect, MCDropout
from slimbayes.methods.ensemble import DeepEnsemble, Deterministic
from slimbayes.methods.meanfield import KTied, MeanField
from slimbayes.methods.patching import ECMP, EMP
from slimbayes.methods.rank1 import BatchEnsemble, Rank1

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

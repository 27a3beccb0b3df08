"""What is seen of rank-1 networks while they train: the spread of their components, members and mixture."""

from __future__ import annotations

from typing import Any

from torch import nn

from slimbayes.analysis import factor_scale
from slimbayes.lab.experiments.images import evaluation
from slimbayes.lab.experiments.networks import Prepared
from slimbayes.lab.experiments.outcome import mean
from slimbayes.lab.experiments.session import Probe, Session
from slimbayes.training.monitor import spread_of
from slimbayes.verbs.evaluation import assess


def progress(session: Session, examples: int) -> Probe:
    """How far components are apart and how wide, and figures of the mixture and its members on the first examples."""

    def probe(model: nn.Module, prepared: Prepared, step: int) -> dict[str, Any]:
        rows = prepared.validation[:examples].to(session.device)
        with evaluation(session, step):
            batch = rows.inputs, rows.targets
            found = assess(model.eval(), [batch], prepare=prepared.data.scaling).compute()
        spread = spread_of(model)
        scales = [value for layer in factor_scale(model).values() for value in layer.values()]
        return {
            "nll": found["nll"], "member_nll": found["gibbs_nll"], "accuracy": 100 * found["accuracy"],
            **({"disagreement": found["disagreement"]} if "disagreement" in found else {}),
            **({"spread": spread["component_spread"]} if spread else {}),
            **({"scale": mean(scales)} if scales else {}),
        }  # fmt: skip

    return probe

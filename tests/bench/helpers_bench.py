"""Results with fixed figures."""

from slimbayes.lab.bench.results import Results, timing, with_ratios

RUN = {"created": "2026-01-01T00:00:00Z", "command": "slimbayes bench", "commit": "abc", "threads": 2,
       "versions": {"torch": "2.13.0"}, "hardware": "a machine"}  # fmt: skip


def cells(group="own", network="mlp", phase="train", mode="eager", **seconds):
    """Cells of one interleaved run, from seconds per round of the deterministic network and of others."""
    where = {"group": group, "network": network, "phase": phase, "mode": mode}
    made = []
    for place, (name, times) in enumerate(seconds.items()):
        if isinstance(times, str):
            made.append({**where, "method": name.replace("_", "-"), "error": times})
            continue
        made.append(
            {
                **where,
                "method": name.replace("_", "-"),
                "parameters": 100 + place,
                "rows": 1024,
                "peak_bytes": 1000 + 100 * place,
                "first_seconds": 10.0 + place if mode != "eager" else None,
                **timing(times, 1024, seconds["deterministic"], 1024),
                "discarded": 1,
                "disturbed": False,
            }
        )
    return with_ratios(made)


def results():
    """A file's worth: own methods in two modes, one failure, and a peer beside its counterpart."""
    found = Results("cpu", "a machine")
    base = [0.010, 0.011, 0.012]
    twice = [2 * seconds for seconds in base]
    found.add(
        cells(
            deterministic=base, rank1=twice, ktied_shared=[0.011, 0.012, 0.013], emp="ValueError: no | norm"
        ),
        RUN,
    )
    found.add(cells(mode="compiled", deterministic=base, rank1=[1.5 * seconds for seconds in base]), RUN)
    found.add(
        cells(
            "peers",
            deterministic=base,
            torchbnn=twice,
            blitz="ImportError: x",
            meanfield_shared=[1.2 * s for s in base],
        ),
        RUN,
    )
    return found

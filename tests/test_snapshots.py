"""Draws with a seed, their losses, KL and gradients are what they were: see ``fixtures/write_draws.py``."""

import json

import pytest
import torch
from helpers_snapshots import FOLDER, NOISES, snapshots, summary

import slimbayes as sb

# Of a checksum's scale. Keyed noise is the same in both types up to 1e-6, and float32 rounds on the way.
NEAR = {torch.float64: 1e-6, torch.float32: 3e-5}
RUNS = [(torch.float64, True), (torch.float64, False), (torch.float32, True)]


@pytest.mark.oldest
@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("snapshot", list(snapshots()), ids=str)
def test_seeded_draws_are_what_they_were(snapshot, pytestconfig):
    known = json.loads((FOLDER / f"{snapshot.network}.json").read_text())[snapshot.method]
    for noise in NOISES:
        expected = known.get(noise, known["example"])  # some methods sample once per draw anyway
        for dtype, fast in RUNS[: 3 if noise == "example" else 2 if noise in known else 1]:
            if fast and dtype == torch.float64 and pytestconfig.option.without_accelerate:
                continue
            with sb.fast_paths(fast):
                found = summary(snapshot, noise, dtype)
            assert len(found) == len(expected)
            for (name, (value, scale)), was in zip(found.items(), expected, strict=True):
                assert abs(value - was) <= NEAR[dtype] * scale, (
                    f"{name}, noise={noise!r}, {dtype}, fast paths {fast}: {value:.9g} instead of {was:.9g}"
                )


def test_a_change_of_one_in_a_hundred_thousand_is_seen():
    snapshot = next(s for s in snapshots() if str(s) == "Rank1-perceptron")
    known = json.loads((FOLDER / "perceptron.json").read_text())["Rank1"]["example"]
    found = summary(snapshot, "example", torch.float64)
    for (name, (value, scale)), was in zip(found.items(), known, strict=True):
        if abs(value) > 0.5 * scale:  # all of one sign, as a loss
            assert abs(value * (1 + 1e-5) - was) > NEAR[torch.float64] * scale, name

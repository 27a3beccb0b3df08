"""Corruptions of 224 × 224 pictures against figures recorded from the package ``imagecorruptions``.

``bench/record_corruptions.py`` made the figures and holds the pictures' formula. The package deforms elastically
by a formula of its own; that corruption is compared with scipy elsewhere. Its frost is from photographs, ours is
not: there only brightness and spread are compared, loosely.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from slimbayes.lab.data.corruptions import SEVERITIES, corrupt

FILE = np.load(Path(__file__).parent / "imagecorruptions_reference.npz")
NAMES, EXACT = FILE["names"].tolist(), FILE["exact"].tolist()
RANDOM = [name for name in NAMES if name not in (*EXACT, "elastic_transform")]
# Mean absolute difference in grey levels. The originals cast float64 down; a tie falls either way in float32.
TOLERANCE = {"pixelate": 0.0, "jpeg_compression": 0.05, "saturate": 0.2}


def recorder():
    path = Path(__file__).parents[2] / "bench" / "record_corruptions.py"
    spec = importlib.util.spec_from_file_location("record_corruptions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def images():
    pictures = recorder().pictures()
    clean = np.stack([recorder().figures(image, image) for image in pictures])
    assert np.allclose(clean, FILE["clean"], atol=0.02), "the formula no longer gives the recorded pictures"
    return pictures


def corrupted(pictures, name, severity, seed=0):
    tensor = torch.from_numpy(pictures.transpose(0, 3, 1, 2).copy())
    return corrupt(tensor, name, severity, seed=seed).numpy().transpose(0, 2, 3, 1)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("severity", SEVERITIES)
def test_without_randomness_pixels_agree(name, severity, images):
    kept = FILE["kept"][EXACT.index(name), severity - 1].astype(int)  # [3, 14, 14, 3]
    step = 224 // kept.shape[1]
    ours = corrupted(images[: len(kept)], name, severity)
    grid = ours[:, step // 2 :: step, step // 2 :: step].astype(int)
    assert np.abs(grid - kept).mean() <= TOLERANCE.get(name, 0.1)
    assert np.abs(grid - kept).max() <= 1
    recorded = FILE["numbers"][NAMES.index(name), severity - 1, : len(kept), 0]
    found = [recorder().figures(image, clean) for image, clean in zip(ours, images, strict=False)]
    assert np.abs(np.array(found) - recorded).max() <= TOLERANCE.get(name, 0.1) + 0.1


@pytest.fixture(scope="module")
def figures(images):
    """Our figures of a random corruption, [severities, images, repeats, figures]."""
    module, repeats, memory = recorder(), 2, {}

    def compute(name):
        if name not in memory:
            memory[name] = np.stack(
                [
                    [
                        [
                            module.figures(one, clean)
                            for one, clean in zip(corrupted(images, name, s, seed), images, strict=True)
                        ]
                        for seed in range(repeats)
                    ]
                    for s in SEVERITIES
                ]
            ).swapaxes(1, 2)
        return memory[name]

    return compute


def spread(numbers):
    """Standard error of the mean over images and repeats, from the repeats' spread around their image's mean."""
    images, repeats = numbers.shape[:2]
    return np.sqrt(numbers.var(1, ddof=1).mean(0) / (images * repeats))


@pytest.mark.parametrize("name", [name for name in RANDOM if name != "frost"])
@pytest.mark.parametrize("severity", SEVERITIES)
def test_with_randomness_figures_agree(name, severity, figures):
    theirs = FILE["numbers"][NAMES.index(name), severity - 1].astype(float)
    ours = figures(name)[severity - 1]
    error = np.hypot(spread(theirs), spread(ours))
    gap = np.abs(ours.mean((0, 1)) - theirs.mean((0, 1)))
    # Half a level: the package casts motion and snow down where ImageMagick rounds.
    assert (gap <= 5 * error + 0.6).all(), dict(
        zip(FILE["figures"], zip(gap, error, strict=True), strict=True)
    )


# One cloud of fog differs from the next by more than two severities do: its plasma is compared pixel by pixel
# with a plain loop elsewhere.
@pytest.mark.parametrize("name", [name for name in RANDOM if name not in ("frost", "fog")])
def test_a_wrong_severity_would_show(name, figures):
    theirs = FILE["numbers"][NAMES.index(name)]  # [severities, images, repeats, figures]
    ours = figures(name)
    error = np.hypot(*(np.mean([spread(part) for part in side], 0) for side in (theirs, ours)))  # [figures]
    gap = np.abs(ours.mean((1, 2))[:, None] - theirs.mean((1, 2))[None])  # [ours, theirs, figures]
    apart = (gap / (error + 0.2))[..., 3:].sum(2)  # contrast, distance and gradients; means hardly change
    for s in range(5):
        neighbours = [apart[s, k] for k in (s - 1, s + 1) if 0 <= k < 5]
        assert apart[s, s] < 0.7 * np.mean(neighbours), apart.round(2)


def test_frost_is_as_bright_as_the_photographs(images):
    theirs = FILE["numbers"][NAMES.index("frost")]  # [severities, images, repeats, figures]
    many = np.concatenate([images] * 4)
    for severity in SEVERITIES:
        ours = corrupted(many, "frost", severity)
        mean, std = ours.mean(), np.mean([image.std() for image in ours])
        assert mean == pytest.approx(theirs[severity - 1, ..., :3].mean(), rel=0.12)
        assert std == pytest.approx(theirs[severity - 1, ..., 3].mean(), rel=0.2)

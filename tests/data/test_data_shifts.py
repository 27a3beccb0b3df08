"""Shifts: hand-computed values, monotone severities, keyed randomness; data from elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import ndimage

from slimbayes.lab.data import DataError, Split, load, out_of_distribution, shift_names, shifts_for
from slimbayes.lab.data.elsewhere import fitted
from slimbayes.lab.data.shifts_images import rotated

DIGITS, WINE, DIABETES = load("digits"), load("wine"), load("diabetes")


def by_name(data, name):
    return shifts_for(data, [name])[0]


@pytest.mark.parametrize("data", [DIGITS, WINE, DIABETES], ids=lambda d: d.name)
def test_every_shift_grows_with_severity(data):
    z = data.scaling(data.test.inputs)
    for shift in shifts_for(data):
        distances = []
        for severity in shift.severities:
            moved = shift.apply(data.test, severity, seed=1)
            assert moved.inputs.dtype == data.test.inputs.dtype and len(moved) == len(data.test)
            again = shift.apply(data.test, severity, seed=1)
            assert torch.equal(moved.inputs, again.inputs) and torch.equal(moved.targets, again.targets)
            if shift.moves_rows:
                distances.append((data.scaling(moved.inputs).mean(0) - z.mean(0)).norm().item())
            else:
                assert moved.targets is data.test.targets
                distances.append((data.scaling(moved.inputs) - z).norm().item())
        assert distances == sorted(distances) and distances[0] > 0, (shift.name, distances)


@pytest.mark.parametrize("data", [DIGITS, WINE], ids=lambda d: d.name)
def test_a_slice_gives_the_slice_of_the_whole(data):
    for shift in shifts_for(data):
        if shift.moves_rows:
            continue
        whole = shift(data.test.inputs, 3, seed=4)
        assert torch.equal(shift(data.test.inputs[20:30], 3, seed=4, first=20), whole[20:30]), shift.name
        if shift.name not in ("blur", "contrast"):
            assert not torch.equal(shift(data.test.inputs, 3, seed=5), whole), shift.name


def test_rotation_is_scipys():
    image = DIGITS.test.inputs[:4]
    for degrees in (10.0, -30.0, 50.0):
        ours = rotated(image, torch.full((4,), degrees))[:, 0].float().numpy()
        for one, source in zip(ours, image[:, 0].numpy().astype(np.float32), strict=True):
            # scipy cuts off outside the outermost centres; padding gives it the zeros that we see there.
            theirs = ndimage.rotate(np.pad(source, 2), degrees, reshape=False, order=1)[2:-2, 2:-2]
            assert abs(one - theirs).max() <= 1.0


def test_rotation_signs_are_fair():
    line = torch.zeros(600, 1, 8, 8, dtype=torch.uint8)
    line[:, :, 0, 4] = 255  # just right of the top's middle: it goes left when turned counter-clockwise
    out = by_name(DIGITS, "rotation")(line, 3, seed=0).float()[:, 0]
    left = (out[:, :, :4].sum((1, 2)) > out[:, :, 4:].sum((1, 2))).float().mean()
    assert abs(left - 0.5) < 0.07


def test_image_shifts_by_hand():
    flat = torch.full((2000, 1, 8, 8), 128, dtype=torch.uint8)
    noisy = by_name(DIGITS, "noise")(flat, 1).float()
    assert abs(noisy.std() / 25.5 - 1) < 0.02 and abs(noisy.mean() - 128) < 0.5
    pair = torch.tensor([0, 200], dtype=torch.uint8).repeat(32).view(1, 1, 8, 8)
    assert by_name(DIGITS, "contrast")(pair, 2).unique().tolist() == [40, 160]  # 100 ± 0.6 · 100
    assert torch.equal(by_name(DIGITS, "blur")(flat, 5), flat)
    for severity, side in enumerate((1, 2, 3, 4, 5), 1):
        black = by_name(DIGITS, "occlusion")(flat, severity) == 0
        assert (black.sum((1, 2, 3)) == side**2).all()
        rows = black.any(3).sum(2)
        assert (rows == side).all()  # one square
        assert len(black.flatten(1).unique(dim=0)) == (9 - side) ** 2  # every place comes up


def test_blur_is_scipys():
    source = DIGITS.test.inputs[0]
    ours = by_name(DIGITS, "blur")(source[None], 3)[0, 0].float().numpy()
    theirs = ndimage.gaussian_filter(source[0].numpy().astype(float), 0.09 * 8, mode="nearest", radius=3)
    assert abs(ours - theirs).max() <= 0.51


def test_table_noise_missing_and_scale():
    mean, std = WINE.train.inputs.mean(0), WINE.train.inputs.std(0, correction=0)
    many = mean.expand(20_000, -1)
    noisy = by_name(WINE, "noise")(many, 4)
    torch.testing.assert_close(noisy.std(0), 0.7 * std, rtol=0.03, atol=0)
    holes = by_name(WINE, "missing")((mean + std).expand(20_000, -1), 2)
    gone = torch.isclose(holes, mean, rtol=1e-4)
    assert abs(gone.float().mean() - 0.2) < 0.005
    assert torch.equal(holes[~gone], (mean + std).expand(20_000, -1)[~gone])
    ratio = by_name(WINE, "scale")(many, 5) / many
    up, down = torch.isclose(ratio, torch.tensor(1.5)), torch.isclose(ratio, torch.tensor(1 / 1.5))
    assert (up | down).all() and up.any() and down.any() and len(ratio.unique(dim=0)) <= 3


def test_constant_columns_get_no_noise():
    data = load("wine")
    inputs = data.train.inputs.clone()
    inputs[:, 2] = 5.0
    constant = replace(data, train=Split(inputs, data.train.targets))
    assert (by_name(constant, "noise")(inputs, 5)[:, 2] == 5).all()


def test_covariate_shift_resamples_whole_rows_towards_one_tail():
    shift = by_name(DIABETES, "covariate")
    pairs = {
        (*x.tolist(), *y.tolist()) for x, y in zip(DIABETES.test.inputs, DIABETES.test.targets, strict=True)
    }
    from sklearn.decomposition import PCA

    z = DIABETES.scaling(DIABETES.train.inputs).numpy()
    axis = PCA(1).fit(z).components_[0]
    axis = axis * np.sign(axis[abs(axis).argmax()])
    u = DIABETES.scaling(DIABETES.test.inputs).numpy() @ axis / (z @ axis).std()
    means = []
    for severity, tilt in enumerate((0.25, 0.5, 1.0, 1.5, 2.0), 1):
        moved = shift.apply(DIABETES.test, severity)
        assert {(*x.tolist(), *y.tolist()) for x, y in zip(moved.inputs, moved.targets, strict=True)} <= pairs
        score = DIABETES.scaling(moved.inputs).numpy() @ axis / (z @ axis).std()
        weights = np.exp(tilt * u) / np.exp(tilt * u).sum()
        expected = (weights * u).sum()
        spread = math.sqrt((weights * (u - expected) ** 2).sum() / len(u))
        assert abs(score.mean() - expected) < 4 * spread
        means.append(score.mean())
    assert means == sorted(means)
    with pytest.raises(DataError, match=r"use \.apply"):
        shift(DIABETES.test.inputs, 1)


def test_names_and_severities():
    assert shift_names(WINE) == ("noise", "missing", "covariate", "scale")
    assert [s.name for s in shifts_for(WINE, "noise")] == ["noise"]
    with pytest.raises(DataError, match="no shift 'fog' for 'wine'; choose from noise, missing"):
        shifts_for(WINE, ["fog"])
    with pytest.raises(DataError, match=r"severity=6 of 'noise'.*\[1, 2, 3, 4, 5\]"):
        by_name(WINE, "noise")(WINE.test.inputs, 6)


def test_colour_images_get_the_corruptions():
    corruptions = pytest.importorskip(
        "slimbayes.lab.data.corruptions", reason="the corruptions are not there"
    )
    pixels = torch.arange(4 * 3 * 32 * 32).mul(7).remainder(256).to(torch.uint8).view(4, 3, 32, 32)
    data = replace(
        DIGITS, name="rgb", train=Split(pixels, torch.arange(4)), test=Split(pixels, torch.arange(4))
    )
    assert tuple(s.name for s in shifts_for(data)) == tuple(corruptions.CORRUPTIONS)
    assert set(corruptions.EXTRA) < set(shift_names(data)) and "rotation" in shift_names(data)
    (shift,) = shifts_for(data, ["gaussian_noise"])
    ours = shift.apply(data.test, 2, seed=3).inputs
    assert torch.equal(ours, corruptions.corrupt(pixels, "gaussian_noise", 2, seed=3))
    assert torch.equal(shift(pixels[2:], 2, seed=3, first=2), ours[2:])


def test_official_files_by_name(tmp_path):
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    # A sparse file: only what is written takes room.
    fog = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    fog[30_000:30_003] = 3
    fog.flush()
    np.save(folder / "labels.npy", np.tile(np.arange(10), 5000))
    pixels = torch.zeros(3, 3, 32, 32, dtype=torch.uint8)
    split = Split(pixels, torch.zeros(3, dtype=torch.long))
    data = replace(DIGITS, name="cifar10", train=split, test=split)
    assert "official/fog" in shift_names(data, tmp_path) and "official/frost" not in shift_names(
        data, tmp_path
    )
    assert "official/fog" not in shift_names(data)
    (shift,) = shifts_for(data, ["official/fog"], root=tmp_path)
    moved = shift.apply(split, 4)
    assert (moved.inputs == 3).all() and moved.targets.tolist() == [0, 1, 2]


def test_photographs_for_digits():
    other = out_of_distribution(DIGITS)
    assert other.inputs.dtype == torch.uint8 and other.inputs.shape[1:] == (1, 8, 8) and len(other) >= 500
    assert torch.equal(other.inputs, out_of_distribution(DIGITS).inputs)
    assert 20 < other.inputs.float().std() < 120  # neither flat nor noise
    assert other.inputs.flatten(1).unique(dim=0).shape[0] > 0.95 * len(other)


def test_shuffled_columns_for_classes():
    other = out_of_distribution(WINE)
    mean = torch.tensor(WINE.scaling.mean)
    original = ((other.inputs - mean) / 2 + mean).sort(0).values
    torch.testing.assert_close(original, WINE.test.inputs.sort(0).values, rtol=1e-4, atol=1e-3)
    unshuffled = mean + 2 * (WINE.test.inputs - mean)
    assert not torch.isclose(other.inputs, unshuffled).all(1).any()


@pytest.mark.parametrize("name", ["diabetes", "cubic"])
def test_far_inputs_for_regression(name):
    data = load(name)
    other = out_of_distribution(data)
    low, high = data.train.inputs.amin(0), data.train.inputs.amax(0)
    assert ((other.inputs < low) | (other.inputs > high)).all()


def test_nothing_fits_odd_images():
    pixels = torch.zeros(2, 2, 8, 8, dtype=torch.uint8)
    odd = replace(DIGITS, train=Split(pixels, torch.arange(2)), test=Split(pixels, torch.arange(2)))
    assert out_of_distribution(odd) is None


def test_fitted_makes_grey_by_luma():
    colour = torch.tensor([100, 200, 50], dtype=torch.uint8).view(1, 3, 1, 1)
    assert fitted(colour, (1, 1, 1)).item() == round(29.9 + 117.4 + 5.7)
    assert torch.equal(fitted(colour, (3, 1, 1)), colour)

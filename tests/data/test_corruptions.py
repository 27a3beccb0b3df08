"""Corruptions: the tables, what corrupt() promises of every one of them, and its errors."""

import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from slimbayes.lab.data import DataError
from slimbayes.lab.data.corruptions import (
    CORRUPTIONS,
    EXTRA,
    SEVERITIES,
    TABLES,
    corrupt,
    load_official,
    parameters,
)
from slimbayes.lab.data.corruptions.textures import frost_textures

ALL = CORRUPTIONS + EXTRA
RANDOM = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
    "elastic_transform",
    "speckle_noise",
    "spatter",
)

# As published, one text per corruption: CIFAR | ImageNet, severities parted by semicolons.
PUBLISHED = """
gaussian_noise: .04; .06; .08; .09; .10 | .08; .12; .18; .26; .38
shot_noise: 500; 250; 100; 75; 50 | 60; 25; 12; 5; 3
impulse_noise: .01; .02; .03; .05; .07 | .03; .06; .09; .17; .27
defocus_blur: .3 .4; .4 .5; .5 .6; 1 .2; 1.5 .1 | 3 .1; 4 .5; 6 .5; 8 .5; 10 .5
glass_blur: .05 1 1; .25 1 1; .4 1 1; .25 1 2; .4 1 2 | .7 1 2; .9 2 1; 1 2 3; 1.1 3 2; 1.5 4 2
motion_blur: 6 1; 6 1.5; 6 2; 8 2; 9 2.5 | 10 3; 15 5; 15 8; 15 12; 20 15
zoom_blur: 1.05 .01; 1.1 .01; 1.15 .01; 1.2 .01; 1.25 .01 | 1.1 .01; 1.15 .01; 1.2 .02; 1.25 .02; 1.3 .03
snow: .1 .2 1 .6 8 3 .95; .1 .2 1 .5 10 4 .9; .15 .3 1.75 .55 10 4 .9; .25 .3 2.25 .6 12 6 .85; \
.3 .3 1.25 .65 14 12 .8 | .1 .3 3 .5 10 4 .8; .2 .3 2 .5 12 4 .7; .55 .3 4 .9 12 8 .7; \
.55 .3 4.5 .85 12 8 .65; .55 .3 2.5 .85 12 12 .55
frost: 1 .2; 1 .3; .9 .4; .85 .4; .75 .45 | 1 .4; .8 .6; .7 .7; .65 .7; .6 .75
fog: .2 3; .5 3; .75 2.5; 1 2; 1.5 1.75 | 1.5 2; 2 2; 2.5 1.7; 2.5 1.5; 3 1.4
brightness: .05; .1; .15; .2; .3 | .1; .2; .3; .4; .5
contrast: .75; .5; .4; .3; .15 | .4; .3; .2; .1; .05
elastic_transform: 0 0 .08; .05 .2 .07; .08 .06 .06; .1 .04 .05; .1 .03 .03 | 2 .7 .1; 2 .08 .2; \
.05 .01 .02; .07 .01 .02; .12 .01 .02
pixelate: .95; .9; .85; .75; .65 | .6; .5; .4; .3; .25
jpeg_compression: 80; 65; 58; 50; 40 | 25; 18; 15; 10; 7
speckle_noise: .06; .1; .12; .16; .2 | .15; .2; .35; .45; .6
gaussian_blur: .4; .6; .7; .8; 1 | 1; 2; 3; 4; 6
spatter: .62 .1 .7 .7 .5 0; .65 .1 .8 .7 .5 0; .65 .3 1 .69 .5 0; .65 .1 .7 .69 .6 1; .65 .1 .5 .68 .6 1 \
| .65 .3 4 .69 .6 0; .65 .3 3 .68 .6 0; .65 .3 2 .68 .5 0; .65 .3 1 .65 1.5 1; .67 .4 1 .65 1.5 1
saturate: .3 0; .1 0; 1.5 0; 2 .1; 2.5 .2 | .3 0; .1 0; 2 0; 5 .1; 20 .2
"""


def recorder():
    path = Path(__file__).parents[2] / "bench" / "record_corruptions.py"
    spec = importlib.util.spec_from_file_location("record_corruptions", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def small():
    """Twelve colour pictures of 32 × 32."""
    return torch.from_numpy(recorder().pictures(12, 32).transpose(0, 3, 1, 2).copy())


def distance(corrupted, clean):
    return (corrupted.float() - clean.float()).abs().mean().item()


def test_tables_are_the_published_ones():
    lines = dict(line.split(": ", 1) for line in PUBLISHED.strip().splitlines())
    assert tuple(lines) == ALL and len(CORRUPTIONS) == 15 and SEVERITIES == (1, 2, 3, 4, 5)
    for name, text in lines.items():
        for table, column in zip(("cifar", "imagenet"), text.split("|"), strict=True):
            rows = tuple(tuple(float(part) for part in row.split()) for row in column.split(";"))
            assert TABLES[table][name] == rows, (name, table)
            assert parameters(name, 4, table) == rows[3]


@pytest.mark.parametrize("name", ALL)
def test_every_corruption_at_32(name, small):
    before = small.clone()
    for severity in SEVERITIES:
        corrupted = corrupt(small, name, severity, seed=3)
        assert corrupted.shape == small.shape and corrupted.dtype == torch.uint8
        assert torch.equal(small, before), "the input was changed"
        assert 0.2 < distance(corrupted, small) < 100
    again, other = corrupt(small, name, 5, seed=3), corrupt(small, name, 5, seed=4)
    assert torch.equal(corrupted, again)
    assert torch.equal(corrupted, other) == (name not in RANDOM)
    assert torch.equal(corrupt(small[5:9], name, 5, seed=3, first=5), corrupted[5:9])
    assert torch.equal(corrupt(small, name, 5, seed=3, chunk=5), corrupted)


@pytest.mark.parametrize("name", RANDOM)
def test_images_and_severities_have_noise_of_their_own(name):
    same = torch.full((2, 3, 32, 32), 100, dtype=torch.uint8)
    same[:, :, ::2, :16] = 180
    first, second = corrupt(same, name, 3)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(2, 1, 28, 28), (3, 1, 8, 8), (2, 3, 20, 37)], ids=str)
@pytest.mark.parametrize("table", ["cifar", "imagenet"])
def test_other_shapes(name, shape, table):
    images = torch.from_numpy(np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8))
    for severity in (1, 5):
        assert corrupt(images, name, severity, table=table).shape == images.shape
    assert corrupt(images[:0], name, 1, table=table).shape == (0, *shape[1:])


@pytest.mark.parametrize(
    "name",
    [
        *("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "defocus_blur", "motion_blur"),
        *("zoom_blur", "gaussian_blur", "fog", "brightness", "contrast", "jpeg_compression", "pixelate"),
    ],
)
@pytest.mark.parametrize("table", ["cifar", "imagenet"])
def test_severities_grow(name, table, small):
    distances = [distance(corrupt(small, name, severity, table=table), small) for severity in SEVERITIES]
    # Angles and fog differ from severity to severity: a little slack for chance.
    assert all(later > 0.95 * earlier for earlier, later in itertools.pairwise(distances))
    assert distances[4] > 1.2 * distances[0], distances


@pytest.mark.parametrize("severity", SEVERITIES)
def test_moments_of_noise_on_a_flat_image(severity):
    flat = torch.full((16, 3, 32, 32), 128, dtype=torch.uint8)  # 49,152 values; x = 128/255

    def values(name):
        return corrupt(flat, name, severity, seed=severity).double()

    level, count = 128 / 255, flat.numel()
    for name, sd in (
        ("gaussian_noise", parameters("gaussian_noise", severity, "cifar")[0]),
        ("speckle_noise", parameters("speckle_noise", severity, "cifar")[0] * level),
        ("shot_noise", (level / parameters("shot_noise", severity, "cifar")[0]) ** 0.5),
    ):
        noisy = values(name)
        assert noisy.std().item() == pytest.approx(255 * sd, rel=0.02), name
        # Truncation lowers the mean by half a level; Poisson counts on a grid by up to one.
        assert -1.1 < noisy.mean().item() - 128 < 5 * 255 * sd / count**0.5, name
    impulse = values("impulse_noise")
    amount = parameters("impulse_noise", severity, "cifar")[0]
    for value in (0, 255):
        share = (impulse == value).double().mean().item()
        assert share == pytest.approx(amount / 2, abs=5 * (amount / 2 / count) ** 0.5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("table", ["cifar", "imagenet"])
def test_a_gpu_gives_the_same_images(name, table, small):
    for severity in SEVERITIES:
        here = corrupt(small, name, severity, table=table)
        there = corrupt(small.cuda(), name, severity, table=table)
        assert there.is_cuda
        # Rounding may take a value across a threshold, a byte or a binary choice, but seldom.
        assert distance(there.cpu(), here) < 0.05
        assert (there.cpu() != here).double().mean() < 0.01


def test_table_follows_the_size():
    flat = torch.full((1, 3, 64, 64), 128, dtype=torch.uint8)
    assert torch.equal(corrupt(flat, "fog", 1), corrupt(flat, "fog", 1, table="cifar"))
    larger = torch.full((1, 3, 65, 65), 128, dtype=torch.uint8)
    assert torch.equal(corrupt(larger, "fog", 1), corrupt(larger, "fog", 1, table="imagenet"))


def test_frost_textures_are_bright_varied_and_tile():
    textures = frost_textures()
    assert textures.shape == (5, 3, 480, 480) and textures.min() >= 0 and textures.max() <= 255
    means = textures.mean((2, 3))
    assert means[0].tolist() == pytest.approx([78, 149, 166], abs=1)
    assert means[4].tolist() == pytest.approx([112, 123, 135], abs=1)
    step = (textures - textures.roll(1, 3)).abs().mean((0, 1, 2))  # [columns]
    assert step[0] < 1.5 * step[1:].mean(), "a seam where the texture repeats"
    assert torch.equal(frost_textures(5), textures[:, :, 2::5, 2::5])


@pytest.mark.parametrize(
    ("images", "name", "severity", "options", "message"),
    [
        (
            torch.zeros(1, 3, 8, 8),
            "fog",
            1,
            {},
            r"images are torch.float32: give raw images as a torch.uint8",
        ),
        ([[0]], "fog", 1, {}, "images are list"),
        (torch.zeros(3, 8, 8).byte(), "fog", 1, {}, r"images are \[3, 8, 8\]: give \[N, C, H, W\]"),
        (torch.zeros(1, 2, 8, 8).byte(), "fog", 1, {}, "1 or 3 channels"),
        (torch.zeros(1, 3, 0, 8).byte(), "fog", 1, {}, r"images are \[1, 3, 0, 8\]"),
        (torch.zeros(1, 3, 8, 8).byte(), "rain", 1, {}, "'rain': choose one of gaussian_noise, .*, saturate"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 0, {}, "severity=0: give a whole number from 1 to 5"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 6, {}, "severity=6"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", True, {}, "severity=True"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 3.0, {}, r"severity=3\.0"),
        (
            torch.zeros(1, 3, 8, 8).byte(),
            "fog",
            1,
            {"table": "mnist"},
            "'mnist' is not known: choose 'cifar'",
        ),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 1, {"first": -1}, "first=-1"),
        (torch.zeros(1, 3, 8, 8).byte(), "fog", 1, {"chunk": 0}, "chunk=0"),
    ],
)
def test_errors(images, name, severity, options, message):
    with pytest.raises(DataError, match=message):
        corrupt(images, name, severity, **options)


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    folder = tmp_path_factory.mktemp("CIFAR-10-C")
    # Mostly holes: the file is 150 MB long and takes a few pages on disk.
    array = np.lib.format.open_memmap(folder / "fog.npy", "w+", np.uint8, (50_000, 32, 32, 3))
    array[20_000, 1, 2] = (7, 8, 9)
    array[29_999, 31, 31, 0] = 5
    array.flush()
    np.save(folder / "labels.npy", np.arange(50_000) % 10_000 % 10)
    return folder


def test_official_files(official):
    images, labels = load_official(official, "fog", 3)
    assert images.shape == (10_000, 3, 32, 32) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64 and labels[:12].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert images[0, :, 1, 2].tolist() == [7, 8, 9] and images[-1, :, 31, 31].tolist() == [5, 0, 0]
    assert images.sum() == 7 + 8 + 9 + 5
    assert load_official(official, "fog", 2)[0].sum() == 0


def test_official_errors(official, tmp_path):
    with pytest.raises(DataError, match=r"no file frost.npy in .*: .*2535967.*3555552"):
        load_official(official, "frost", 1)
    with pytest.raises(DataError, match="'rain': choose one of"):
        load_official(official, "rain", 1)
    with pytest.raises(DataError, match="severity=6"):
        load_official(official, "fog", 6)
    (tmp_path / "fog.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match="damaged or not a"):
        load_official(tmp_path, "fog", 1)
    np.save(tmp_path / "fog.npy", np.zeros((5, 32, 32, 3), np.uint8))
    with pytest.raises(DataError, match=r"holds uint8 \[5, 32, 32, 3\], not uint8 \[50000, 32, 32, 3\]"):
        load_official(tmp_path, "fog", 1)
    (tmp_path / "fog.npy").unlink()
    (tmp_path / "fog.npy").symlink_to(official / "fog.npy")
    with pytest.raises(DataError, match=r"no file labels.npy"):
        load_official(tmp_path, "fog", 1)
    np.save(tmp_path / "labels.npy", np.zeros(50_000))
    with pytest.raises(DataError, match=r"holds float64 \[50000\], not integers"):
        load_official(tmp_path, "fog", 1)

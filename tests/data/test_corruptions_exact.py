"""Corruptions against other implementations and brute force: Pillow, scipy, colorsys and plain loops."""

import colorsys
import io
import math

import numpy as np
import pytest
import torch

from slimbayes.core.keyed_noise import layer_key
from slimbayes.lab.data.corruptions import blur, corrupt, digital, jpeg, noise, parameters, spatter, weather
from slimbayes.lab.data.corruptions.filters import Draws, bilinear, fold, gaussian, truncated

ndimage = pytest.importorskip("scipy.ndimage")
stats = pytest.importorskip("scipy.stats")
Image = pytest.importorskip("PIL.Image")


def rng():
    return np.random.default_rng(0)


def picture(height, width, channels):
    """A textured picture uint8 [H, W, C]."""
    y, x = np.mgrid[:height, :width]
    waves = np.stack([127 + 100 * np.sin(x / 7 + y / (5 + k) + k) for k in range(channels)], -1)
    return np.clip(waves + rng().normal(0, 20, waves.shape), 0, 255).astype(np.uint8)


def batch(image):
    return torch.from_numpy(image.transpose(2, 0, 1).copy())[None]


def single(tensor):
    return tensor[0].numpy().transpose(1, 2, 0)


def draws(count=1, table="cifar"):
    return Draws(layer_key(0, "test"), torch.arange(count), table)


SHAPES = [(32, 32), (28, 28), (8, 8), (96, 96), (30, 45), (17, 33), (5, 7), (4, 4), (1, 1)]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_jpeg_is_pillows(shape, channels):
    image = picture(*shape, channels)
    for quality in (95, 80, 65, 58, 50, 40, 25, 18, 15, 10, 7):
        file = io.BytesIO()
        Image.fromarray(image if channels == 3 else image[..., 0]).save(file, "JPEG", quality=quality)
        expected = np.asarray(Image.open(file)).reshape(image.shape).astype(int)
        ours = single(jpeg.jpeg_compression(batch(image), (quality,), draws())).astype(int)
        # Equal with libjpeg-turbo as in Pillow's wheels; another libjpeg may round a few pixels otherwise.
        assert np.abs(ours - expected).mean() <= 0.05, quality


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pixelate_is_pillows(shape, channels):
    image = picture(*shape, channels)
    for share in (0.95, 0.9, 0.85, 0.75, 0.65, 0.6, 0.5, 0.4, 0.3, 0.25):
        small = tuple(max(1, int(side * share)) for side in shape[::-1])
        pil = Image.fromarray(image if channels == 3 else image[..., 0])
        expected = pil.resize(small, Image.Resampling.BOX).resize(shape[::-1], Image.Resampling.BOX)
        ours = single(digital.pixelate(batch(image), (share,), draws()))
        assert np.array_equal(ours, np.asarray(expected).reshape(image.shape)), share


@pytest.mark.parametrize("sd", [0.05, 0.4, 1.0, 2.5, 6.0, 40.0])
@pytest.mark.parametrize(("border", "truncate"), [("nearest", 4.0), ("reflect", 3.0), ("mirror", 4.0)])
def test_gaussian_is_scipys(sd, border, truncate):
    values = rng().random((2, 20, 31))
    expected = [ndimage.gaussian_filter(plane, sd, mode=border, truncate=truncate) for plane in values]
    ours = gaussian(torch.from_numpy(values), sd, border, truncate)
    assert np.allclose(ours.numpy(), expected, atol=1e-12)


def test_blurs_truncate_as_the_original_does():
    image = picture(32, 32, 3)
    blurred = np.stack(
        [ndimage.gaussian_filter(p / 255, 0.8, mode="nearest") for p in image.transpose(2, 0, 1)]
    )
    ours = corrupt(batch(image), "gaussian_blur", 4)[0].numpy().astype(int)
    assert (ours != np.uint8(blurred * 255)).mean() < 0.002


@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_defocus_is_a_correlation_with_the_disk(severity):
    image = picture(24, 40, 3)
    row = parameters("defocus_blur", severity, "imagenet")
    kernel = blur.disk(*row).numpy()
    # The original softens the kernel within its own frame: a disk that touches it gains up to 1 %.
    assert kernel.sum() == pytest.approx(1, abs=0.02) and kernel.shape == (
        (21, 21) if severity == 5 else (17, 17)
    )
    for channel in range(3):
        expected = ndimage.correlate(image[..., channel] / 255, kernel, mode="mirror") * 255
        ours = single(blur.defocus_blur(batch(image), row, draws()))[..., channel]
        assert np.abs(ours - np.floor(expected + 1e-3)).mean() < 0.002


def test_disk_by_hand():
    # Radius 1.5 covers a block of nine; a blur of 0.1 leaves it.
    kernel = blur.disk(1.5, 0.1).numpy()
    assert kernel[7:10, 7:10] == pytest.approx(np.full((3, 3), 1 / 9)) and kernel[7:10, 7:10].sum() > 1 - 1e-9
    # Radius 0.3 is one pixel; three taps of a Gaussian of 0.4 spread it.
    side = math.exp(-1 / (2 * 0.4**2))
    centre = 1 / (1 + 2 * side)
    assert blur.disk(0.3, 0.4)[8, 7:10].tolist() == pytest.approx(
        [centre**2 * side, centre**2, centre**2 * side]
    )


@pytest.mark.parametrize("angle", [-45.0, -10.0, 0.0, 33.0, 45.0, -90.0, -135.0])
def test_motion_by_brute_force(angle):
    values = rng().random((20, 26))
    expected, total = np.zeros_like(values), 0.0
    for i in range(2 * 6 + 1):
        weight = math.exp(-(i**2) / (2 * 2.5**2))
        dy = math.ceil(i * math.sin(math.radians(angle)) - 0.5)
        dx = math.ceil(i * math.cos(math.radians(angle)) - 0.5)
        rows, columns = np.clip(np.arange(20) + dy, 0, 19), np.clip(np.arange(26) + dx, 0, 25)
        expected, total = expected + weight * values[np.ix_(rows, columns)], total + weight
    angles = torch.tensor([angle, 7.0], dtype=torch.float64)
    ours = blur.along_line(torch.from_numpy(values).expand(2, 1, 20, 26), 6, 2.5, angles)
    assert np.allclose(ours[0, 0].numpy(), expected / total, atol=1e-12)
    assert not np.allclose(ours[1, 0].numpy(), expected / total, atol=1e-3)


def test_motion_angles_cover_a_right_angle():
    point = torch.zeros(400, 1, 41, 41, dtype=torch.uint8)
    point[:, :, 20, 20] = 255
    smeared = corrupt(point, "motion_blur", 5, seed=1).double()[:, 0]
    # The line runs backwards from a bright pixel: to the left, up or down by as much as left at most.
    share = smeared / smeared.sum((1, 2), keepdim=True)
    place = torch.arange(41, dtype=torch.float64) - 20
    down, right = (share.sum(2) * place).sum(1), (share.sum(1) * place).sum(1)
    slope = torch.rad2deg(torch.atan2(-down, -right))
    assert slope.abs().max() < 50 and abs(slope.mean()) < 4
    assert slope.std() == pytest.approx(90 / math.sqrt(12), rel=0.1)


@pytest.mark.parametrize("factor", [1, 1.01, 1.11, 1.25, 1.75, 2.25, 4.5])
def test_zoom_is_scipys(factor):
    values = rng().random((32, 32))
    kept = math.ceil(32 / factor)
    start = (32 - kept) // 2
    large = ndimage.zoom(values[start : start + kept, start : start + kept], factor, order=1)
    trim = (len(large) - 32) // 2
    ours = blur.clipped_zoom(torch.from_numpy(values)[None], factor)[0].numpy()
    assert np.allclose(ours, large[trim : trim + 32, trim : trim + 32], atol=1e-12)


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_glass_equals_the_sequential_sweep(shift):
    size = 24
    offsets = rng().integers(-shift, shift, size=(2, size, size, 2))
    for index in range(2):
        pixels = np.arange(size * size).reshape(size, size, 1).repeat(3, 2)
        for h in range(size - shift, shift, -1):
            for w in range(size - shift, shift, -1):
                dx, dy = offsets[index, h, w]
                # The original's exchange of two views: the second assignment reads what the first wrote.
                pixels[h, w], pixels[h + dy, w + dx] = pixels[h + dy, w + dx], pixels[h, w]
        ours = blur.sweep_sources(torch.from_numpy(offsets.transpose(0, 3, 1, 2).copy()), shift)
        assert np.array_equal(ours[index].numpy(), pixels[..., 0])


def test_glass_moves_pixels_within_its_reach():
    # One sweep of shift 1 copies from offsets −1 and 0, each with probability ½; a tiny blur leaves the picture.
    image = torch.arange(200).view(200, 1, 1, 1).expand(200, 1, 32, 32).clone()
    image[:, 0] = torch.arange(32) * 8
    moved = blur.glass_blur(image.to(torch.uint8), (0.05, 1, 1), draws(200))[:, 0, 2:-1, 2:-1]
    step = moved.long() // 8 - torch.arange(2, 31)
    share = [(step == offset).double().mean().item() for offset in (-1, 0)]
    assert sum(share) == 1
    assert share[0] == pytest.approx(0.5, abs=5 * 0.5 / step.numel() ** 0.5)


@pytest.mark.parametrize(("photons", "level"), [(60, 100), (3, 200), (500, 30), (12, 255), (5, 0), (75, 3)])
def test_shot_noise_is_poisson(photons, level):
    images = torch.full((12, 3, 64, 64), level, dtype=torch.uint8)
    values = noise.shot_noise(images, (photons,), draws(12)).numpy().ravel()
    rate = level * photons / 255
    counts = np.arange(photons + 1)
    mass = stats.poisson.pmf(counts, rate)
    mass[-1] = stats.poisson.sf(photons - 1, rate)  # all that is clipped to white
    shown = np.floor(counts * (255 / photons) + 1e-9).astype(int)  # several counts may share a byte
    expected = np.bincount(shown, weights=mass, minlength=256) * values.size
    observed = np.bincount(values, minlength=256)
    assert observed[expected < 1e-6].sum() == 0
    common = expected >= 10
    rest = np.array([expected[~common].sum(), observed[~common].sum()])
    expected, observed = np.append(expected[common], rest[0]), np.append(observed[common], rest[1])
    keep = expected > 1
    if keep.sum() > 1:
        statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
        assert stats.chi2.sf(statistic, keep.sum() - 1) > 1e-3


@pytest.mark.parametrize(("size", "decay"), [(4, 2.0), (16, 1.75)])
def test_plasma_by_brute_force(size, decay):
    uniform = rng().random(size * size - 1)
    clouds, used, step, wibble = np.zeros((size, size)), 0, size, 100.0
    while step >= 2:
        half, cells = step // 2, size // step
        takes = uniform[used : used + 3 * cells**2].reshape(3, cells, cells)
        for kind, (oy, ox) in enumerate(((half, half), (0, half), (half, 0))):
            ring = ((-half, -half), (-half, half), (half, -half), (half, half))
            ring = ring if kind == 0 else ((-half, 0), (half, 0), (0, -half), (0, half))
            for i in range(cells):
                for j in range(cells):
                    y, x = i * step + oy, j * step + ox
                    mean = sum(clouds[(y + dy) % size, (x + dx) % size] for dy, dx in ring) / 4
                    clouds[y, x] = mean + wibble**2 * (2 * takes[kind, i, j] - 1)
        used, step, wibble = used + 3 * cells**2, half, wibble / decay
    clouds = (clouds - clouds.min()) / (clouds.max() - clouds.min())
    assert np.allclose(weather.plasma(torch.from_numpy(uniform)[None], size, decay)[0].numpy(), clouds)


def test_fog_keeps_the_largest_value_as_its_bound():
    image = picture(32, 32, 3) // 2
    foggy = corrupt(batch(image), "fog", 5)
    assert foggy.max() <= image.max() and foggy.float().mean() > image.mean()


@pytest.mark.parametrize("severity", [1, 3, 4, 5])
def test_brightness_and_saturation_are_those_of_hsv(severity):
    image = rng().integers(0, 256, (12, 12, 3)).astype(np.uint8)
    image[:3] = image[:3, :, :1]  # grey
    image[0, 0] = 0
    image[0, 1] = 255
    bright, vivid = np.zeros(image.shape), np.zeros(image.shape)
    for y, x in np.ndindex(12, 12):
        h, s, v = colorsys.rgb_to_hsv(*(image[y, x] / 255))
        more = parameters("brightness", severity, "imagenet")[0]
        a, b = parameters("saturate", severity, "imagenet")
        bright[y, x] = colorsys.hsv_to_rgb(h, s, min(v + more, 1))
        vivid[y, x] = colorsys.hsv_to_rgb(h, min(s * a + b, 1), v)
    for name, expected in (("brightness", bright), ("saturate", vivid)):
        ours = single(corrupt(batch(image), name, severity, table="imagenet")).astype(int)
        expected = np.floor(expected * 255 + 1e-6)
        assert np.abs(ours - expected).max() <= 1 and (ours != expected).mean() < 0.02, name


def test_contrast_by_hand():
    image = torch.tensor([[[[0, 100], [200, 100]]]], dtype=torch.uint8)
    assert corrupt(image, "contrast", 2).tolist() == [[[[50, 100], [150, 100]]]]


def test_elastic_map_sends_the_three_points_where_it_says():
    moved = torch.from_numpy(rng().uniform(-3, 3, (2, 3, 2)))
    centre, side = 16, 10
    points = [[26.0, 26.0], [26.0, 6.0], [6.0, 6.0]]
    assert points[0][0] == centre + side
    for image in range(2):
        for k in range(3):
            x, y = np.add(points[k], moved[image, k].numpy())
            rows = torch.full((1, 32, 1), float(y), dtype=torch.float64)
            columns = torch.full((1, 1, 32), float(x), dtype=torch.float64)
            source = digital.affine_sources(moved[image : image + 1], rows, columns)
            assert [float(part.flatten()[0]) for part in source] == pytest.approx(points[k][::-1])


@pytest.mark.parametrize("border", ["reflect", "mirror", "nearest"])
def test_reading_between_pixels_is_scipys(border):
    values = rng().random((9, 13))
    y, x = rng().uniform(-30, 40, (2, 1, 9, 13))
    expected = ndimage.map_coordinates(values, [y[0], x[0]], order=1, mode=border)
    ours = bilinear(torch.from_numpy(values)[None, None], torch.from_numpy(y), torch.from_numpy(x), border)
    assert np.allclose(ours[0, 0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("border", "mode"), [("nearest", "edge"), ("reflect", "symmetric"), ("mirror", "reflect")]
)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_folded_indices_are_numpys_padding(border, mode, size):
    expected = np.pad(np.arange(size), 12, mode=mode)
    assert fold(torch.arange(-12, size + 12), size, border).tolist() == expected.tolist()


def test_elastic_displacement_is_a_smooth_field():
    # On a ramp the output is the source position itself, so displacement can be read off.
    ramp = torch.arange(32, dtype=torch.uint8).mul(8).expand(64, 1, 32, 32).contiguous()
    strong = corrupt(ramp, "elastic_transform", 4).double()[:, 0, 8:24, 8:24] / 8
    gentle = corrupt(ramp, "elastic_transform", 1).double()[:, 0, 8:24, 8:24] / 8
    place = torch.arange(8, 24, dtype=torch.float64)
    spread = 32 * 0.1 * math.sqrt(1 / 3) * _gaussian_norm(32 * 0.04)
    jitter = [(part - place).std().item() for part in (gentle, strong)]
    assert jitter[0] == pytest.approx(32 * 0.08 / math.sqrt(3), rel=0.35)  # the affine part alone
    assert jitter[1] == pytest.approx(math.hypot(spread, 32 * 0.05 / math.sqrt(3)), rel=0.35)


def _gaussian_norm(sd):
    """Standard deviation of white noise after a Gaussian blur in two dimensions."""
    weights = np.exp(-0.5 * (np.arange(-30, 31) / sd) ** 2)
    return ((weights / weights.sum()) ** 2).sum()


def test_canny_by_brute_force():
    layer = gaussian(torch.from_numpy(rng().normal(0.65, 0.3, (2, 48, 48))), 2.0)
    layer = layer.masked_fill(layer < 0.68, 0).mul(255).floor()
    edges = spatter.canny(layer, 50, 150).numpy()
    for image, found in zip(layer.numpy(), edges, strict=True):
        dx = ndimage.sobel(image, axis=1, mode="nearest")
        dy = ndimage.sobel(image, axis=0, mode="nearest")
        size = np.pad(np.abs(dx) + np.abs(dy), 1)
        weak = np.zeros_like(image, bool)
        for y, x in np.ndindex(*image.shape):
            angle = math.degrees(math.atan2(abs(dy[y, x]), abs(dx[y, x])))
            m, window = size[y + 1, x + 1], size[y : y + 3, x : x + 3]
            if angle < 22.5:
                peak = m > window[1, 0] and m >= window[1, 2]
            elif angle > 67.5:
                peak = m > window[0, 1] and m >= window[2, 1]
            elif (dx[y, x] < 0) != (dy[y, x] < 0):
                peak = m > window[0, 2] and m > window[2, 0]
            else:
                peak = m > window[0, 0] and m > window[2, 2]
            weak[y, x] = peak and m > 50
        labels, _ = ndimage.label(weak, np.ones((3, 3)))
        strong = np.unique(labels[weak & (size[1:-1, 1:-1] > 150)])
        assert np.array_equal(found, np.isin(labels, strong[strong > 0])) and found.sum() > 50


def test_chamfer_is_near_the_euclidean_distance():
    edges = torch.from_numpy(rng().random((3, 40, 50)) < 0.002)
    edges[2] = False
    ours = spatter.chamfer(edges).numpy()
    for found, image in zip(ours[:2], edges.numpy(), strict=False):
        exact = np.minimum(ndimage.distance_transform_edt(~image), 20)
        assert np.abs(found - exact).max() < 0.03 * 20
    assert (ours[2] == 20).all()
    lone = torch.zeros(1, 9, 9, dtype=torch.bool)
    lone[0, 4, 4] = True
    expected = [0, 1, 1.4, 2.1969, 2.8, 2.1969 + 1]  # straight, diagonal, knight, two diagonals, knight + 1
    places = ((4, 4), (4, 5), (5, 5), (5, 6), (6, 6), (5, 7))
    assert [spatter.chamfer(lone)[0, y, x].item() for y, x in places] == pytest.approx(expected)


def test_bytes_survive_the_unit_interval():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(truncated(levels.float() / 255), levels)
    assert truncated(torch.tensor([-1.0, 2.0, 0.5])).tolist() == [0, 255, 127]

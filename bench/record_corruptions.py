"""Record what the PyPI package ``imagecorruptions`` does to fixed pictures, for the tests to compare with.

Runs in an environment of its own, for the package is old: imagecorruptions, numpy < 2, scikit-image,
opencv-python-headless and setuptools < 81. Neither torch nor slimbayes is needed.

    python bench/record_corruptions.py tests/data/imagecorruptions_reference.npz

``pictures`` and ``figures`` need only numpy; the tests load them from this file.
"""

from __future__ import annotations

import inspect
import os
import sys

import numpy as np

SIZE = 224
IMAGES, REPEATS = 6, 4
KEPT_IMAGES, KEPT_STEP = 3, 16  # of the outputs without randomness, pixels on a grid are kept
EXACT = (
    "defocus_blur",
    "zoom_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
FIGURES = ("red", "green", "blue", "std", "distance", "across", "down")


def pictures(count: int = IMAGES, size: int = SIZE) -> np.ndarray:
    """Pictures uint8 [count, size, size, 3]: colour gradients, a disk, a bar, and texture of several scales."""
    y, x = np.mgrid[:size, :size] / size
    images = []
    for index in range(count):
        random = np.random.RandomState(index)  # the legacy generator: its stream is frozen
        tilt, phase = random.uniform(-1, 1, (3, 2)), random.uniform(0, 6, 3)
        planes = []
        for channel in range(3):
            plane = 110 + 60 * (tilt[channel, 0] * (x - 0.5) + tilt[channel, 1] * (y - 0.5)) * 2
            for waves, height in ((3, 20), (11, 12), (37, 8)):
                angle = phase[channel] + index
                plane = plane + height * np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)))
            planes.append(plane)
        image = np.stack(planes, -1)
        cx, cy, radius = random.uniform(0.3, 0.7), random.uniform(0.3, 0.7), random.uniform(0.1, 0.25)
        image[(x - cx) ** 2 + (y - cy) ** 2 < radius**2] += random.uniform(-70, 70, 3)
        bar = np.abs((x - cx) * np.cos(phase[0]) + (y - cy) * np.sin(phase[0])) < 0.03
        image[bar] = random.uniform(0, 255, 3)
        image[: size // 8, : size // 4] = random.uniform(30, 220)  # a grey patch: no hue
        image += random.normal(0, 6, image.shape[:2])[..., None]
        images.append(np.clip(image, 0, 255).astype(np.uint8))
    return np.stack(images)


def figures(corrupted: np.ndarray, clean: np.ndarray) -> np.ndarray:
    """Numbers of one image [H, W, 3] in the order of ``FIGURES``."""
    image = corrupted.astype(np.float64)
    return np.array(
        [
            *image.mean((0, 1)),
            image.std(),
            np.abs(image - clean).mean(),
            np.abs(np.diff(image, axis=1)).mean(),
            np.abs(np.diff(image, axis=0)).mean(),
        ]
    )


def reference():
    """The package, with the one call that newer versions of scikit-image refuse put right."""
    import imagecorruptions
    from imagecorruptions import corruptions

    blur = corruptions.gaussian

    def gaussian(image, *args, multichannel=False, **options):
        return blur(image, *args, channel_axis=-1 if multichannel else None, **options)

    if "multichannel" not in inspect.signature(blur).parameters:
        corruptions.gaussian = gaussian
    return imagecorruptions


def main(path: str) -> None:
    package = reference()
    corrupt, names = package.corrupt, package.get_corruption_names("all")
    images = pictures()
    numbers = np.zeros((len(names), 5, IMAGES, REPEATS, len(FIGURES)), np.float32)
    grid = slice(KEPT_STEP // 2, None, KEPT_STEP)
    kept = np.zeros((len(EXACT), 5, KEPT_IMAGES, SIZE // KEPT_STEP, SIZE // KEPT_STEP, 3), np.uint8)
    for n, name in enumerate(names):
        for severity in range(1, 6):
            for i, image in enumerate(images):
                for repeat in range(REPEATS):
                    if name in EXACT and repeat > 0:
                        numbers[n, severity - 1, i, repeat] = numbers[n, severity - 1, i, 0]
                        continue
                    np.random.seed(1000 * n + 100 * severity + 10 * i + repeat)
                    result = corrupt(image, severity=severity, corruption_name=name)
                    numbers[n, severity - 1, i, repeat] = figures(result, image)
                if name in EXACT and i < KEPT_IMAGES:
                    kept[EXACT.index(name), severity - 1, i] = result[grid, grid]
        print(name, flush=True)
    with open(path + ".part", "wb") as file:
        np.savez_compressed(
            file,
            names=np.array(names),
            exact=np.array(EXACT),
            figures=np.array(FIGURES),
            numbers=numbers,
            kept=kept,
            clean=np.stack([figures(image, image) for image in images]),
        )
    os.replace(path + ".part", path)


if __name__ == "__main__":
    main(sys.argv[1])

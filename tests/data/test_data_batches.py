"""Batches: order, ranks, resumption and augmentation are functions of (seed, epoch, position)."""

import pytest
import torch

from slimbayes.containers.batches import augmented, draws
from slimbayes.core.keyed_noise import layer_key, philox
from slimbayes.lab.data import Batches, DataError, Scaling, Split


def images(count=23, channels=3, side=7):
    pixels = torch.arange(count * channels * side * side) * 37 % 251 + 1  # never 0: padding shows
    return Split(pixels.to(torch.uint8).view(count, channels, side, side), torch.arange(count))


def make(split=None, batch_size=6, **options):
    options = {
        "scaling": Scaling((0.4, 0.5, 0.6), (0.2, 0.3, 0.1), 1 / 255),
        "augment": ("crop", "flip"),
        **options,
    }
    return Batches(split or images(), batch_size, **options)


def same(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, second, strict=True)
    )


def test_every_example_once_per_epoch():
    batches = make()
    assert len(batches) == 4 and batches.num_data == 23
    for number in range(3):
        labels = torch.cat([targets for _, targets in batches.epoch(number)])
        assert labels.sort().values.tolist() == list(range(23))
    assert [len(t) for _, t in batches] == [6, 6, 6, 5]
    assert [len(t) for _, t in make(drop_last=True)] == [6, 6, 6]


def test_epochs_and_seeds_differ_and_repeat():
    assert same(make().epoch(2), make().epoch(2))
    assert same(make(), make().epoch(0))
    assert not same(make().epoch(1), make().epoch(2))
    assert not same(make(seed=1).epoch(1), make(seed=2).epoch(1))
    assert not same(make(shuffle=False).epoch(1), make(shuffle=False).epoch(2))  # crops differ
    plain = make(shuffle=False, augment=())
    assert same(plain.epoch(1), plain.epoch(2))


def test_resuming_in_the_middle_of_an_epoch_is_exact():
    whole = list(make(seed=5).epoch(7))
    for start in range(len(whole) + 1):
        assert same(make(seed=5).epoch(7, start=start), whole[start:])


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_ranks_put_together_are_the_global_batch(world):
    split = images(29)
    parts = [list(make(split, batch_size=10, rank=r, world=world).epoch(1)) for r in range(world)]
    whole = list(make(split, batch_size=10).epoch(1))
    assert {len(p) for p in parts} == {len(whole)} == {3}
    for index, (inputs, targets) in enumerate(whole):
        assert torch.equal(torch.cat([p[index][0] for p in parts]), inputs)
        assert torch.equal(torch.cat([p[index][1] for p in parts]), targets)
        sizes = [len(p[index][1]) for p in parts]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_a_last_batch_smaller_than_the_world_is_dropped_by_all():
    split = images(22)
    assert [len(make(split, batch_size=10, rank=r, world=3)) for r in range(3)] == [2, 2, 2]
    assert len(make(split, batch_size=10, rank=0, world=2)) == 3


def reference(image, names, seed, epoch, position, pad):
    """One image, pixel by pixel."""
    zero = torch.tensor(0)
    words = philox(
        (torch.tensor(position), torch.tensor(epoch), zero, zero), layer_key(seed, "batches.augment")
    )
    down, right, flip = int(words[0]), int(words[1]), int(words[2]) >= 2**31
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=image.dtype)
    padded[:, pad : pad + height, pad : pad + width] = image
    a, b = (int(word * (2 * pad + 1) / 2**32) for word in (down, right)) if "crop" in names else (pad, pad)
    out = padded[:, a : a + height, b : b + width]
    return out.flip(-1) if "flip" in names and flip else out


@pytest.mark.parametrize("names", [("crop",), ("flip",), ("crop", "flip"), ("flip", "crop")])
@pytest.mark.parametrize("pad", [1, 2, 4])
def test_augmentation_equals_a_slow_reference(names, pad):
    split = images(40, channels=2, side=6)
    positions = torch.arange(100, 140)
    fast = augmented(split.inputs, names, draws(3, 9, positions), pad)
    slow = [reference(i, names, 3, 9, p, pad) for i, p in zip(split.inputs, positions.tolist(), strict=True)]
    assert fast.dtype == torch.uint8 and torch.equal(fast, torch.stack(slow))


def test_offsets_and_flips_are_uniform():
    """A single bright pixel in the middle shows the offset: each of 25 about as often, half flipped."""
    image = torch.zeros(5000, 1, 9, 9, dtype=torch.uint8)
    image[:, :, 4, 4] = 1
    where = augmented(image, ("crop",), draws(0, 0, torch.arange(5000)), 2).flatten(1).float().argmax(1)
    counts = where.bincount(minlength=81).view(9, 9)
    inner = counts[2:7, 2:7].flatten()
    assert inner.sum() == 5000
    assert ((inner - 200.0) ** 2 / 200).sum() < 51.2  # χ²₂₄ at 0.1 %
    image[:, :, 4, 4], image[:, :, 4, 0] = 0, 1
    flipped = augmented(image, ("flip",), draws(0, 0, torch.arange(5000)), 2)[:, 0, 4, 8].float().mean()
    assert abs(flipped - 0.5) < 0.025


def test_scaling_targets_and_layout():
    table = Split(torch.tensor([[1.0], [3.0]]), torch.tensor([[10.0], [30.0]]))
    batches = Batches(table, 2, Scaling((2.0,), (1.0,)), Scaling((20.0,), (10.0,)), shuffle=False)
    ((inputs, targets),) = batches
    assert inputs.tolist() == [[-1.0], [1.0]] and targets.tolist() == [[-1.0], [1.0]]
    ((raw, _),) = Batches(images(3), 3)
    assert raw.dtype == torch.float32 and raw.max() > 1  # no scaling: raw values
    ((wide, _),) = make(images(3), channels_last=True, device="cpu")
    assert wide.is_contiguous(memory_format=torch.channels_last)
    ((narrow, _),) = make(images(3))
    assert torch.equal(wide, narrow)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_makes_the_same_batches():
    split = images(50, side=32)
    for (a, b), (c, d) in zip(make(split).epoch(3), make(split, device="cuda").epoch(3), strict=True):
        assert c.is_cuda and torch.equal(b, d.cpu())
        torch.testing.assert_close(a, c.cpu(), atol=1e-6, rtol=0)
    raw = [list(make(split, scaling=None, device=device)) for device in ("cpu", "cuda")]
    assert all(torch.equal(a, c.cpu()) for (a, _), (c, _) in zip(*raw, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2, "world": 2}, "rank=2"),
        ({"batch_size": 2, "world": 3}, "row for every rank"),
        ({"augment": ("spin",)}, "'spin' is not one of crop, flip"),
        ({"pad": -1}, "pad=-1"),
        ({"batch_size": 50, "drop_last": True}, "smaller batch size"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(DataError, match=message):
        make(**options)


def test_wrong_data_and_epochs():
    with pytest.raises(DataError, match="for images"):
        Batches(Split(torch.zeros(3, 2), torch.zeros(3)), 1, augment=("flip",))
    with pytest.raises(DataError, match="empty"):
        Batches(Split(torch.zeros(0, 2), torch.zeros(0)), 1)
    for call in ((-1, 0), (0, 5), (0, -1)):
        with pytest.raises(DataError, match="batches 0 to 3"):
            next(make().epoch(*call))

"""Trees and tar shards: labels, order, ranks, workers, resumption, crops, damage."""

import io
import random
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.containers.streams import Place, centre_crop, random_crop
from slimbayes.lab.data import DataError, ImageTree, StreamBatches, TarShards, load, stream

CLASSES = ("ant", "bee", "cat")


def encoded(colour, size=(12, 10), kind="PNG"):
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def colour(label, number):
    return (label * 50, number * 10, 200)


@pytest.fixture
def tree(tmp_path):
    for part, count in (("train", 7), ("val", 2)):
        for label, name in enumerate(CLASSES):
            folder = tmp_path / "tree" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                (folder / f"{number}.png").write_bytes(encoded(colour(label, number)))
            (folder / "readme.txt").write_text("not an image")
    return tmp_path / "tree"


def write_shard(path, members):
    with tarfile.open(path, "w") as tar:
        for name, raw in members:
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for shard in range(3):
        members = []
        for number in range(7):
            members += [(f"{shard:03}{number}.cls", str(shard).encode()),
                        (f"{shard:03}{number}.png", encoded(colour(shard, number)))]  # fmt: skip
        write_shard(folder / f"train-{shard:06}.tar", members)
    write_shard(folder / "val-000000.tar", [("0.jpg", encoded((1, 2, 3), kind="JPEG")), ("0.cls", b"2\n")])
    return folder


@pytest.fixture(params=["tree", "shards"])
def folder(request):
    return request.getfixturevalue(request.param)


def same(first, second):
    first, second = list(first), list(second)
    return len(first) == len(second) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, second, strict=True)
    )


def seen(data, batches):
    """(label, number) of every image, told by its colour."""
    out = []
    for inputs, targets in batches:
        raw = data.scaling.undo(inputs).mul(1).round()[:, :, 4, 4]
        assert torch.equal(raw[:, 0], targets * 50.0) and (raw[:, 2] == 200).all()
        out += [(int(t), round(g / 10)) for t, g in zip(targets, raw[:, 1].tolist(), strict=True)]
    return out


def test_every_image_once_with_its_label(folder):
    data = stream(folder, size=8)
    assert len(data.train) == 21 and data.shape == (3, 8, 8) and data.num_outputs == 3
    assert data.classes == (CLASSES if folder.name == "tree" else ("0", "1", "2"))
    batches = data.batches("train", 4)
    assert len(batches) == 6 and batches.num_data == 21
    orders = [seen(data, batches.epoch(number)) for number in (0, 1)]
    everything = [(label, number) for label in range(3) for number in range(7)]
    assert sorted(orders[0]) == sorted(orders[1]) == everything
    assert orders[0] != orders[1] and orders[0] != everything
    assert seen(data, batches) == orders[0]
    test = data.batches("test", 10)
    assert len(list(test)) == 1
    with pytest.raises(DataError, match="no part 'valid'"):
        data.batches("valid", 4)


def test_workers_ranks_and_resumption_agree(folder):
    data = stream(folder, size=8, seed=3)
    whole = list(data.batches("train", 5).epoch(2))
    assert same(data.batches("train", 5, workers=2).epoch(2), whole)
    assert same(data.batches("train", 5).epoch(2, start=2), whole[2:])
    parts = [list(data.batches("train", 5, rank=r, world=2, drop_last=True).epoch(2)) for r in (0, 1)]
    for index, (left, right) in enumerate(zip(*parts, strict=True)):
        assert torch.equal(torch.cat([left[0], right[0]]), whole[index][0])
        assert torch.equal(torch.cat([left[1], right[1]]), whole[index][1])
    other = stream(folder, size=8, seed=4)
    assert not same(other.batches("train", 5).epoch(2), whole)


def test_windows_keep_shards_together(shards):
    data = TarShards(sorted(shards.glob("train-*.tar")), size=8, locality=7)
    orders = [data.order(epoch) for epoch in range(4)]
    for order in orders:
        assert order.sort().values.tolist() == list(range(21))
        for window in order.split(7):
            assert len({int(row) // 7 for row in window}) == 1  # one shard at a time
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert len({tuple(int(w[0]) // 7 for w in order.split(7)) for order in orders}) > 1


def test_a_shard_that_shrinks_or_goes(shards):
    path = shards / "train-000001.tar"
    data = TarShards([path], size=8)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(data.table[5, 1]) + 10])
    with pytest.raises(DataError, match=r"train-000001\.tar: 0015\.png: the shard ends inside this member"):
        data[5]
    path.unlink()
    with pytest.raises(DataError, match=r"0010\.png: cannot be read"):
        data[0]


def test_streams_are_sources_of_the_training_loop(tree):
    sources = pytest.importorskip("slimbayes.training.sources")
    assert isinstance(stream(tree).batches("train", 4), sources.Source)


def test_class_names_beside_shards(shards):
    (shards / "classes.txt").write_text("tench\ngoldfish\nshark\n\n")
    assert stream(shards).classes == ("tench", "goldfish", "shark")
    (shards / "classes.txt").write_text("tench\ngoldfish\n")
    with pytest.raises(DataError, match="a label 2, but 2 class names"):
        stream(shards)


def gradient(width, height):
    x = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    y = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([x, y, np.zeros_like(x)], -1).round().astype(np.uint8))


def test_crops_cover_what_they_should():
    image = gradient(400, 300)
    areas, ratios, flips = [], [], 0
    for number in range(300):
        crop = random_crop(image, 32, random.Random(number)).float()
        assert crop.shape == (3, 32, 32)
        dx, dy = (crop[0, :, -1] - crop[0, :, 0]).mean().item(), (crop[1, -1] - crop[1, 0]).mean().item()
        width, height = abs(dx) / 255 * 400 * 32 / 31, dy / 255 * 300 * 32 / 31
        areas.append(width * height / 120_000)
        ratios.append(width / height)
        flips += dx < 0
    assert min(areas) > 0.07 and max(areas) < 1.05 and 0.4 < np.mean(areas) < 0.6
    assert min(ratios) > 0.7 and max(ratios) < 1.42 and abs(flips - 150) < 30
    centre = centre_crop(image, 224).float()
    assert centre.shape == (3, 224, 224)
    # The shorter side becomes 256: 224/256 of the height, and as many pixels of the width, about the middle.
    assert abs(centre[1, 0, 0] - 255 * 16 / 256) < 2 and abs(centre[1, -1, 0] - 255 * 240 / 256) < 2
    assert abs(centre[0].mean() - 127.5) < 1 and abs(centre[0, 0, -1] - centre[0, 0, 0] - 255 * 224 / 341) < 3
    long = random_crop(gradient(400, 10), 8, random.Random(0))
    assert long.shape == (3, 8, 8) and centre_crop(gradient(400, 10), 8).shape == (3, 8, 8)


def test_crops_are_resized_as_asked(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(noise).save(tmp_path / part / "a" / "0.png")
    wide = Image.fromarray(noise).resize((46, 37), resample=Image.Resampling.BICUBIC)  # 32 · 256/224 = 37
    wanted = np.asarray(wide.crop((7, 2, 39, 34)))
    bicubic, bilinear = (stream(tmp_path, size=32, resample=how) for how in ("bicubic", "bilinear"))
    assert np.array_equal(bicubic.test[0][0].movedim(0, -1).numpy(), wanted)
    assert not torch.equal(bicubic.train[0][0], bilinear.train[0][0])
    assert torch.equal(bilinear.train[0][0], stream(tmp_path, size=32).train[0][0])
    with pytest.raises(DataError, match="resample='nearest' is unknown; use one of bilinear, bicubic"):
        stream(tmp_path, resample="nearest")


def test_a_damaged_image_is_named_or_skipped(folder):
    if folder.name == "tree":
        path = folder / "train" / "bee" / "3.png"
        path.write_bytes(path.read_bytes()[:50])
        name = str(path)
    else:
        path = folder / "train-000001.tar"
        raw = path.read_bytes()
        start = raw.index(b"\x89PNG", raw.index(b"0013.png"))
        path.write_bytes(raw[:start] + b"damage!!" + raw[start + 8 :])
        name = f"{path}: 0013.png"
    for workers in (0, 2):
        with pytest.raises(DataError) as caught:
            list(stream(folder, size=8).batches("train", 4, workers=workers))
        assert str(caught.value).startswith(f"{name}: damaged or not an image")
        assert "Traceback" not in str(caught.value)
    data = stream(folder, size=8, on_error="skip")
    batches = data.batches("train", 4, workers=2)
    assert len(seen(data, batches)) == 20 and batches.skipped == 1
    alone = StreamBatches(data.train, 1)
    with pytest.raises(DataError, match="damaged"):  # nothing left of its batch
        list(alone)


def test_a_cut_shard_is_named(shards):
    path = shards / "train-000002.tar"
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index(b"0026.png") + 520])
    with pytest.raises(DataError, match=r"train-000002\.tar"):
        list(stream(shards, size=8).batches("train", 4))
    path.write_bytes(b"no tar at all" * 100)
    with pytest.raises(DataError, match=r"train-000002\.tar: damaged at or after the member '\(the first"):
        stream(shards)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x")], "'a' lacks its image or its .cls"),
        ([("a.cls", b"1")], "'a' lacks its image or its .cls"),
        ([("a.jpg", b"x"), ("a.cls", b"-1")], "negative label"),
        ([("a.jpg", b"x"), ("a.cls", b"one")], "damaged at or after the member 'a.cls'"),
        ([("a.txt", b"x")], "no pairs of key.jpg and key.cls"),
    ],
)
def test_odd_shards(tmp_path, members, message):
    write_shard(tmp_path / "train-0.tar", members)
    with pytest.raises(DataError, match=message):
        TarShards([tmp_path / "train-0.tar"])
    with pytest.raises(DataError, match="no tar shards"):
        TarShards([])


def test_odd_trees(tree, tmp_path, monkeypatch):
    with pytest.raises(DataError, match="no such folder"):
        ImageTree(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no folders"):
        ImageTree(tree / "train" / "ant")
    (tree / "val" / "dog").mkdir()
    with pytest.raises(DataError, match="'dog' is none of the 3 classes"):
        stream(tree)
    (tmp_path / "empty" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="no images"):
        ImageTree(tmp_path / "empty")
    with pytest.raises(DataError, match="size=0"):
        ImageTree(tree / "train", size=0)
    with pytest.raises(DataError, match="row for every rank"):
        StreamBatches(ImageTree(tree / "train"), 2, world=3)
    with pytest.raises(DataError, match="smaller batch size"):
        StreamBatches(ImageTree(tree / "train"), 50, drop_last=True)
    with pytest.raises(DataError, match="batches 0 to 20"):
        next(StreamBatches(ImageTree(tree / "train"), 1).epoch(0, start=22))
    (tree / "train" / "ant" / "0.png").unlink()
    gone = ImageTree(tree / "train")
    (tree / "train" / "ant" / "1.png").unlink()
    with pytest.raises(DataError, match=r"1\.png: cannot be read"):
        gone[0]


def test_imagenet_by_name(tree, tmp_path, monkeypatch):
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    with pytest.raises(DataError, match=r"ImageNet not found: no data root given.*image-net\.org"):
        stream("imagenet")
    assert len(stream("imagenet", tree).train) == 21
    tree.rename(tmp_path / "imagenet")
    data = stream("imagenet", tmp_path)
    assert data.name == "imagenet" and data.shape == (3, 224, 224)
    with pytest.raises(DataError, match=r"slimbayes\.data\.stream\('imagenet', root\)"):
        load("imagenet", tmp_path)


def test_shards_without_a_test_part(shards):
    (shards / "val-000000.tar").unlink()
    with pytest.raises(DataError, match=r"neither val-\*\.tar nor test-\*\.tar"):
        stream(shards)


def test_items_are_functions_of_their_place(tree):
    data = ImageTree(tree / "train", size=8)
    assert torch.equal(data[Place(3, 1, 5)][0], data[Place(3, 1, 5)][0])
    assert data[20][1] == 2 and data.label(0) == 0

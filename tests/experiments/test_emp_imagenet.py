"""ImageNet's entries on small trees and shards: data, figures, corruption, and two processes against one."""

import concurrent.futures
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.data import DataError, stream
from slimbayes.data.corruptions import corrupt
from slimbayes.experiments import emp_imagenet as emp
from slimbayes.experiments import emp_imagenet_tables as tables
from slimbayes.experiments import find, imagenet, read_result, session
from slimbayes.experiments.averages import columns_of, running_means
from slimbayes.experiments.emp_figures import figures_of
from slimbayes.experiments.imagenet_data import SIZES, make_tree, prepare
from slimbayes.experiments.running import reproduce
from slimbayes.experiments.session import OutOfTime, Session
from slimbayes.experiments.several import Processes

Image = pytest.importorskip("PIL.Image")
ROOT = Path(__file__).parents[2]
SMALL = replace(SIZES["smoke"], data="imagenet", types=("contrast",), severities=(5,))
FEW = replace(emp.RUNS["smoke"], samples=(1, 2))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_tree(folder / "imagenet")
    return folder


def to_shards(tree, folder):
    """The same images as tar files."""
    folder.mkdir(parents=True)
    for part in ("train", "val"):
        with tarfile.open(folder / f"{part}-000000.tar", "w") as tar:
            for label, place in enumerate(sorted((tree / part).iterdir())):
                for file in sorted(place.iterdir()):
                    for suffix, content in (("jpg", file.read_bytes()), ("cls", str(label).encode())):
                        entry = tarfile.TarInfo(f"{label}-{file.stem}.{suffix}")
                        entry.size = len(content)
                        tar.addfile(entry, io.BytesIO(content))


def test_the_made_up_tree_is_whole_and_made_once(tmp_path):
    make_tree(tmp_path / "tree")
    files = sorted((tmp_path / "tree").rglob("*.jpg"))
    before = {file: file.stat().st_mtime_ns for file in files}
    make_tree(tmp_path / "tree")
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["tree"]
    data = stream(tmp_path / "tree", size=32)
    assert (len(data.train), len(data.test), data.num_outputs) == (72, 64, 8) and data.shape == (3, 32, 32)


def test_streams_are_told_apart_by_names_and_labels(tree, tmp_path):
    whole = stream("imagenet", tree, 32)
    assert whole.fingerprint() == stream("imagenet", tree, 64).fingerprint()
    to_shards(tree / "imagenet", tmp_path / "imagenet")
    shards = stream("imagenet", tmp_path, 32)
    assert shards.fingerprint() != whole.fingerprint() and len(shards.fingerprint()) == 16
    assert shards.train.title(0) == "0-000.jpg" and whole.train.title(0) == "class-0/000.jpg"
    renamed = tmp_path / "imagenet" / "classes.txt"
    renamed.write_text("\n".join("abcdefgh"))
    assert stream("imagenet", tmp_path, 32).fingerprint() == shards.fingerprint(), (
        "names of classes do not matter"
    )


@pytest.mark.parametrize("layout", ["tree", "shards"])
def test_paper_scale_reads_imagenet_from_the_data_root(tree, tmp_path, monkeypatch, layout):
    monkeypatch.setitem(SIZES, "paper", SMALL)  # its folder, at a size that a test can train
    monkeypatch.setitem(emp.RUNS, "paper", FEW)
    root = tree
    if layout == "shards":
        root = tmp_path / "data"
        to_shards(tree / "imagenet", root / "imagenet")
    options = {
        "results": tmp_path / "results",
        "work": tmp_path / "work",
        "data_root": str(root),
        "progress": False,
    }
    document = read_result(reproduce("emp/table5", "paper", jobs=1, only=["imagenet"], **options))
    assert list(document["provenance"]["fingerprints"]) == ["imagenet"]
    assert any("72 + 64 images in 8 classes, streamed" in text for text in document["deviations"])
    (table,) = document["tables"]
    rows = {row["label"]: row["values"] for row in table["rows"]}
    assert list(rows) == list(find("emp/table5").table("imagenet-c").rows)
    assert rows["Vanilla"] == {"mce": [100.0], "contrast": [100.0]}
    assert document["settings"]["imagenet"]["data"] == "imagenet" and len(document["runs"]) == 4


@pytest.mark.parametrize("scale", ["desk", "gpu"])
def test_scales_without_imagenet_name_the_data(tmp_path, scale):
    for name in ("emp/table4", "emp/figure4", "emp/figure7"):  # the others have CIFAR there
        with pytest.raises(
            ValueError, match=f"ImageNet at scale {scale}: .*imagenet/train .* under --data-root"
        ):
            reproduce(name, scale, tmp_path, tmp_path / "work", progress=False)


def test_missing_images_are_named(tmp_path):
    with pytest.raises(DataError, match=r"ImageNet not found: looked in .*imagenet/train/<class>"):
        reproduce(
            "emp/table4",
            "paper",
            tmp_path,
            tmp_path / "work",
            data_root=str(tmp_path),
            jobs=1,
            progress=False,
        )


def test_halves_of_shared_entries_have_the_printed_rows(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    for name in ("emp/figure6", "emp/table9", "emp/table10", "emp/table11"):
        (table,) = tables.RUNNERS[name].report(small, "imagenet").tables
        printed = find(name).table("imagenet")
        if name == "emp/figure6":
            assert list(table.rows) == list(printed.rows) and table.columns == ("1", "2", "3", "4")
            continue
        assert table.columns == printed.columns
        assert list(table.rows) == ["S = 1", "S = 2", "S = 3", "S = 4", "Vanilla"]
        assert all(0 <= table.mean(row, "accuracy") <= table.mean(row, "top5") <= 100 for row in table.rows)


def test_recipes_are_the_papers(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    paper = Session("paper", tmp_path)
    printed = find("emp/table4").table("imagenet")
    for label in tables.ALL:
        made = emp.recipe(paper, label)
        training = made.training
        assert (training.optimizer, training.lr, training.schedule) == ("adam", 1e-3, "constant")
        assert (training.epochs, training.batch_size, training.samples) == (100, 256, 1)
        assert training.l2 == pytest.approx(0.001 / 256) and made.network == "resnet18"
        with torch.device("meta"):
            model = made.build((3, 224, 224), 1000, seed=0)
        counted = sb.summary(model)
        assert float(f"{100 * counted.overhead:.3g}") == printed.value(label, "overhead_percent"), label
        if label == "Dropout":  # before every norm, and nowhere else
            dropped = {row.name for row in counted.rows if row.method == "MCDropout"}
            assert dropped == {name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
            assert len(dropped) == 20
    size, run = SIZES["paper"], emp.RUNS["paper"]
    assert run.samples == (1, 20, 100, 200) and run.corrupted == 100 and size.pixels == 224
    assert len(size.types) == 15 and size.severities == (1, 2, 3, 4, 5)


def test_averages_of_ever_more_draws_by_hand():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    model = sb.bayesianize(net, sb.ECMP(3, init_noise=0.5)).eval()
    x = torch.randn(5, 3)
    with torch.no_grad():
        draws = sb.draw(model, x, samples=7, seed=0, first_example=11).softmax(-1)  # [7, 5, 4]
    for chunk in (5, 12, 1000):
        ((_, found),) = running_means(model, x, (1, 4, 7), chunk, first=11)
        for count, p in zip((1, 4, 7), found, strict=True):
            torch.testing.assert_close(p, draws[:count].mean(0), atol=1e-6, rtol=1e-5)


def test_figures_by_their_definitions():
    torch.manual_seed(1)
    p, y = torch.randn(400, 9).mul(2).softmax(-1), torch.randint(9, (400,))
    found = figures_of(columns_of(p, y))
    assert found["accuracy"] == pytest.approx(100 * sb.metrics.accuracy(p, y))
    assert found["top5"] == pytest.approx(100 * sb.metrics.top_k_accuracy(p, y, 5))
    assert found["ece_percent"] == pytest.approx(100 * sb.metrics.ece(p, y, bins=20, min_count=5), rel=1e-6)
    assert found["mce_percent"] == pytest.approx(100 * sb.metrics.mce(p, y, bins=20, min_count=5), rel=1e-6)
    assert found["nll"] == pytest.approx(-float(p[torch.arange(400), y].log().mean()), rel=1e-5)
    share = found["accuracy"] / 100
    assert found["errors"]["accuracy"] == pytest.approx(100 * (share * (1 - share) / 399) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("relative", [False, True])
def test_corruption_errors_are_the_metrics_own(relative):
    ours = {"clean": 0.3, "fog": [0.4, 0.6], "snow": [0.5, 0.9]}
    vanilla = {"clean": 0.25, "fog": [0.5, 0.6], "snow": [0.4, 0.8]}
    found = tables.errors_against(ours, vanilla, relative)
    rates, base = ({k: v for k, v in each.items() if k != "clean"} for each in (ours, vanilla))
    if relative:
        expected = sb.metrics.relative_mean_corruption_error(rates, 0.3, base, 0.25)
    else:
        expected = sb.metrics.mean_corruption_error(rates, base)
    assert sum(found.values()) / 2 == pytest.approx(expected)
    assert tables.errors_against(ours, {**vanilla, "fog": [0.25, 0.25]}, relative=True).keys() == {"snow"}


def test_corrupted_errors_are_those_of_corrupted_images(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    rates, data = emp.corruption_rates(small, trained), prepare(small).data
    images = torch.stack([data.test[row][0] for row in range(len(data.test))])
    labels = torch.tensor([data.test.label(row) for row in range(len(data.test))])
    for name, severity, rate in [
        ("contrast", 5, rates["contrast"][1]),
        ("brightness", 3, rates["brightness"][0]),
    ]:
        x = data.scaling(corrupt(images, name, severity))
        with torch.no_grad():
            wrong = (sb.draw(trained.model, x)[0].argmax(-1) != labels).double().mean()
        assert rate == pytest.approx(float(wrong), abs=1e-9)
    assert len(set(map(str, rates.values()))) > 1, "corruption does something"


def test_what_was_measured_is_kept_until_weights_change(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    job = emp.Job("imagenet", "EMP (BN)", 0)
    trained = emp.train(small, job)
    before = emp.by_samples(small, trained)
    with patch.object(emp, "columns", side_effect=AssertionError("measured again")):
        assert emp.by_samples(small, trained) == before
        sb.save(
            sb.bayesianize(sb.models.WideResNet(10, 1, 8), sb.EMP(5, ("norm",))),
            trained.folder / "model.safetensors",
        )
        with pytest.raises(AssertionError, match="measured again"):
            emp.by_samples(small, trained)


@pytest.mark.parametrize("damage", ["[]", "{", '{"state": {}}'])
def test_damaged_figures_are_measured_again(tmp_path, damage):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    before = emp.by_samples(small, trained)
    (trained.folder / imagenet.KEPT).write_text(damage)
    assert emp.by_samples(small, trained) == before
    (trained.folder / "model.safetensors").unlink()
    with pytest.raises(sb.CheckpointError, match="delete the folder to train again"):
        emp.by_samples(small, emp.train(small, emp.Job("imagenet", "Vanilla", 0)))


def test_two_jobs_of_one_network_do_not_train_it_twice(tmp_path, monkeypatch):
    """In two threads here, in two processes of a pool else: the second finds what the first has trained."""
    trained, inside, fit = [], [], session.fit

    def slow(*rest, **more):
        inside.append(1)
        assert len(inside) == 1, "both train at once"
        result = fit(*rest, **more)
        trained.append(result.step)
        inside.pop()
        return result

    monkeypatch.setattr(session, "fit", slow)
    jobs = [emp.Job("imagenet", "Vanilla", 0, corrupted) for corrupted in (False, True)]
    sessions = [Session("smoke", tmp_path, progress=False) for _ in jobs]
    prepare(sessions[0])
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(emp.measure, sessions, jobs))
    assert trained == [3]
    found = emp.train(sessions[0], jobs[0])
    known = json.loads((found.folder / imagenet.KEPT).read_text())
    assert any(key.startswith("by samples") for key in known) and any(
        key.startswith("error of") for key in known
    )


def test_a_spent_budget_stops_between_batches(tmp_path):
    small = Session("smoke", tmp_path, progress=False)
    trained = emp.train(small, emp.Job("imagenet", "Vanilla", 0))
    small.deadline = 0.0
    with pytest.raises(OutOfTime):
        emp.by_samples(small, trained)
    assert not (trained.folder / imagenet.KEPT).exists()


@pytest.mark.parametrize(
    ("count", "most", "processes"), [(50_000, 2048, 8), (64, 96, 2), (65, 16, 3), (7, 100, 4)]
)
def test_no_image_is_lost_between_processes(count, most, processes):
    from slimbayes.data.batches import batch_count, batch_rows

    batch = imagenet.even_batch(count, most, processes)
    number = batch_count(count, batch, processes, drop_last=False)
    rows = [
        row
        for index in range(number)
        for rank in range(processes)
        for row in range(*batch_rows(index, count, batch, rank, processes))
    ]
    assert rows == list(range(count))


def test_entries_of_one_device_say_so(tmp_path):
    with pytest.raises(ValueError, match="trained on one device each; use --jobs"):
        reproduce("ktied/table2", "smoke", tmp_path, tmp_path, devices=2, progress=False)
    with pytest.raises(ValueError, match="give at least 1 of each"):
        Session("smoke", tmp_path, devices=0)


def test_torchrun_says_how_many_processes_there_are(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    found = Processes()
    assert (found.devices, found.num_nodes, found.number) == (4, 2, 8)


def environment():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    return {**clean, **ours, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.slow
def test_two_processes_train_and_measure_together(tmp_path, monkeypatch):
    """Trained by two processes, then measured by one: the same figures, whoever measures."""
    command = [
        sys.executable, "-m", "slimbayes", "reproduce", "emp/figure4", "emp/table5", "--devices", "2", "--quiet",
        "--only", "imagenet",
        "--work", str(tmp_path / "work"), "--results", str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("emp/figure4 at scale smoke") == done.stdout.count("emp/table5 at scale smoke") == 1
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(session, "fit", lambda *rest, **more: pytest.fail("trained again"))
    for file in (tmp_path / "work").rglob(imagenet.KEPT):
        file.unlink()
    for name in ("figure4", "table5"):
        one = reproduce(
            f"emp/{name}", "smoke", tmp_path / "one", tmp_path / "work", progress=False, only=["imagenet"]
        )
        two = read_result(tmp_path / "two" / "emp" / f"{name}.smoke.json")
        one = read_result(one)
        assert two["settings"]["imagenet"]["processes"] == 2 and one["settings"]["imagenet"]["processes"] == 1
        assert two["provenance"]["command"].endswith("--devices 2")
        assert any("2 processes share a batch" in text for text in two["deviations"])
        assert [run["steps"] for run in two["runs"]] == [3] * 4
        assert two["tables"][0]["rows"] == one["tables"][0]["rows"] and two["tables"][0]["rows"]
        assert json.dumps(two["curves"]) == json.dumps(one["curves"])


def test_networks_of_cifar_have_one_device_each(tmp_path):
    with pytest.raises(ValueError, match="one device each; give --only imagenet, or use --jobs"):
        reproduce("emp/table5", "smoke", tmp_path, tmp_path / "work", devices=2)

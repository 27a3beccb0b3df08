"""The rank-1 paper's networks on CIFAR: the rows are the paper's, what is measured is right, and checks can fail."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core.conversion import converted_layers
from slimbayes.lab.data import Dataset, Scaling, Split
from slimbayes.lab.data import load as load_data
from slimbayes.lab.experiments import rank1_checks, rank1_images, rank1_measures, rank1_recipes, rank1_words
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import Prepared
from slimbayes.lab.experiments.outcome import Table
from slimbayes.lab.experiments.rank1_curves import averaged
from slimbayes.lab.experiments.rank1_recipes import (
    ABLATIONS,
    BATCH_ENSEMBLE,
    CAUCHY,
    DETERMINISTIC,
    GAUSSIAN,
    HEAVY,
    MAIN,
    MORE,
    SAME,
    SHARED,
    SHORT,
    SIZES,
    TUNING,
    WIDE,
    jobs_of,
    recipe,
    rows_of,
)
from slimbayes.lab.experiments.rank1_settings import Chosen, gaussian_cifar, short
from slimbayes.lab.experiments.running import reproduce
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.method_text import parse_stored


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return Session("smoke", tmp_path_factory.mktemp("work"), progress=False)


def test_rows_under_another_name_are_the_same_network():
    entries = {
        "both": "figure2", "K = 4": "figure3", "Average": "figure4", "p = 0.001": "figure-v1-5",
        "Real (Normal)": "figure9", "KL summed": "collapse",
    }  # fmt: skip
    assert set(entries) == set(SAME) - {"p = 0.01"}  # the rate that a search chose for short schedules
    made = recipe(Session("gpu", "work"), SHORT, SAME["p = 0.01"])
    assert parse_stored(made.method).dropout_rate == 0.01
    main = rows_of(MAIN)[GAUSSIAN]
    for label, entry in entries.items():
        settings = [s for s in find(f"rank1/{entry}").settings if label in s.methods]
        assert len(settings) == 1
        assert parse_stored(settings[0].methods[label]) == parse_stored(main.method), label
        assert settings[0].training == main.setting.training, label


def test_every_row_of_every_entry_is_trained():
    for name, runner in rank1_images.RUNNERS.items():
        jobs = [job for plan in runner.jobs for job in plan(Session("paper", "work"))]
        trained = {job.label for job in jobs}
        labels = {SAME.get(x, x) for s in find(name).settings for x in s.methods}
        labels = {GAUSSIAN if x.endswith(("sample", "samples")) else x for x in labels}
        if name in ("rank1/figure2", "rank1/figure3", "rank1/figure4", "rank1/figure9", "rank1/figure-v1-5"):
            labels -= {"K = 16, 4 per step"}
        assert labels <= trained, name
        assert len({(job.setting, job.label, job.seed) for job in jobs}) == len(set(jobs))
        pickle.dumps(runner.jobs)


@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_schedules_keep_the_papers_proportions(scale):
    session = Session(scale, "work")
    for setting in (MAIN, MORE, ABLATIONS):
        for label, row in rows_of(setting).items():
            training, paper = recipe(session, setting, label).training, row.setting.training
            size, few = SIZES[setting, scale], paper["batch_size"]
            if size.split is not None:
                few = 512
            elif size.equal and few == 512:  # baselines, as rank-1 networks
                few = 128
            assert training.epochs == round(size.share * (250 if size.equal else paper["epochs"])), label
            members = 4 if label.startswith("Ensemble") else 1
            assert training.milestones == tuple(paper["milestones"])
            rate = size.split or paper["lr"] * few / paper["batch_size"]
            searched = size.chosen is not None and label != "MFVI BNN"
            penalty = size.chosen.l2 if searched else paper["l2"]
            assert training.schedule == ((searched and size.chosen.schedule) or "steps")
            assert (training.l2 * members, training.lr / members) == pytest.approx((penalty, rate))
            assert training.batch_size == few
            assert training.kl_annealing == paper.get("kl_annealing", sb.Training().kl_annealing)
            assert training.warmup == 1.0
    rows = {
        label: parse_stored(rows_of(ABLATIONS)[label].method).components
        * recipe(session, ABLATIONS, label).training.batch_size
        for label in ("K = 1", "K = 2", "K = 8", "K = 16", GAUSSIAN)
    }
    assert set(rows.values()) == {512}


def test_the_search_tries_every_method_with_the_same_penalties():
    session = Session("gpu", "work")
    found = {job.label: recipe(session, TUNING, job.label) for job in jobs_of(session, TUNING)}
    assert len(found) == 16 and {job.seed for job in jobs_of(session, TUNING)} == {0}
    for method in (DETERMINISTIC, BATCH_ENSEMBLE, GAUSSIAN, CAUCHY):
        mine = [made.training for label, made in found.items() if label.startswith(method)]
        assert sorted({training.l2 for training in mine}) == [2e-4, 5e-4], method
        assert {(training.epochs, training.batch_size, training.lr) for training in mine} == {(20, 128, 0.1)}


@pytest.mark.parametrize("setting", [MAIN, MORE, WIDE, SHORT])
def test_short_schedules_take_what_the_search_chose(setting):
    session = Session("gpu", "work")
    chosen = SIZES[setting, "gpu"].chosen
    assert (chosen.search == "rank1/tuning") == (setting == MAIN)
    labels = {job.label for job in jobs_of(session, setting)}
    assert setting != SHORT or len(labels) == 11  # of which Figures 2, 3 and v1-5 and Table 8 are made
    for label in labels:
        ours = parse_stored(recipe(session, setting, label).method)
        paper = parse_stored(rows_of(setting)[label].method)
        changed = {}
        if label == CAUCHY:
            changed = {"dropout_rate": float(chosen.heavy_rate)}
            changed |= {"kl_reduction": "mean"} if chosen.heavy_options else {}
        elif isinstance(paper, sb.Rank1):
            changed = {} if label.startswith("p = ") else {"dropout_rate": chosen.rate}
            changed |= {"kl_reduction": "mean"} if chosen.options else {}
        if isinstance(paper, (sb.Rank1, sb.BatchEnsemble)) and chosen.distance is not None:
            changed["random_sign_init"] = -chosen.distance
        assert ours == dataclasses.replace(paper, **changed), label  # nothing else


def test_a_search_may_choose_every_value_of_a_gaussian():
    chosen = Chosen("x", 1e-3, 0.2, "1e-4", schedule="cosine", distance=0.3)
    made = short(gaussian_cifar(100), chosen)
    method, before = (parse_stored(s.methods[GAUSSIAN]) for s in (made, gaussian_cifar(100)))
    assert method == dataclasses.replace(before, random_sign_init=-0.3, dropout_rate=0.2)
    kept = {name: value for name, value in made.training.items() if name not in ("l2", "schedule")}
    assert kept.items() <= gaussian_cifar(100).training.items()
    assert (made.training["l2"], made.training["schedule"]) == (1e-3, "cosine")


def test_the_search_of_shared_batches_changes_one_thing_at_a_time():
    session = Session("gpu", "work")
    found = {job.label: recipe(session, SHARED, job.label) for job in jobs_of(session, SHARED)}
    assert len(found) == 21 and {made.training.batch_size for made in found.values()} == {512}
    assert {made.training.lr for made in found.values()} == {0.2}
    middle, base = (
        found[f"{GAUSSIAN}, p = 0.03"],
        parse_stored(found[f"{GAUSSIAN}, p = 0.03"].method),
    )
    for label, change in {"p = 0.1": {"dropout_rate": 0.1}, "p = 0.03, KL summed": {"kl_reduction": "sum"},
                          "p = 0.03, close": {"random_sign_init": -0.2}}.items():  # fmt: skip
        other = found[f"{GAUSSIAN}, {label}"]
        assert parse_stored(other.method) == dataclasses.replace(base, **change)
        assert other.training == middle.training
    light = found[f"{GAUSSIAN}, p = 0.03, l2 = 0.00025"]
    assert light.method == middle.method
    assert light.training == dataclasses.replace(middle.training, l2=2.5e-4)
    one, other = found[f"{GAUSSIAN}, p = 0.01"], found[f"{GAUSSIAN}, p = 0.01, steps"]
    assert other.method == one.method
    assert other.training == dataclasses.replace(one.training, schedule="steps")
    assert one.training.schedule == "cosine"
    heavy = {job.label: recipe(session, HEAVY, job.label) for job in jobs_of(session, HEAVY)}
    assert len(heavy) == 5 and len(jobs_of(session, HEAVY)) == 10
    for label, made in heavy.items():
        assert dataclasses.replace(made, setting=SHARED) == found[label]
    least = heavy[f"{CAUCHY}, p = 1e-10, close"]
    for rate in ("1e-8", "1e-7", "1e-6"):
        other = heavy[f"{CAUCHY}, p = {rate}, close"]
        assert other.method == least.method.replace("1e-10", rate) and other.training == least.training


def test_an_entry_says_where_its_own_rows_differ_and_no_others(session):
    def said(*labels):
        return " ".join(rank1_words.deviations(session, MAIN, jobs_of(session, MAIN, labels)))

    few, all_of_them = said(GAUSSIAN, BATCH_ENSEMBLE), said()
    for words in ("mean-field networks", "members of an ensemble", "width=5"):
        assert words in all_of_them and words not in few
    assert "width=10" in few and "digits" in few


def test_networks_of_equal_parameters_at_gpu_scale():
    counts = {
        label: rank1_checks.parameters_of(
            MAIN, label, rank1_recipes.network_of(MAIN, "gpu", label), (3, 32, 32), 10
        )
        for label in rows_of(MAIN)
    }
    assert abs(counts["Ensemble 4×WRN-28-5"] / counts[DETERMINISTIC] - 1) < 0.02
    assert counts["Ensemble 4×WRN-28-10"] == 4 * counts[DETERMINISTIC]
    assert 1 < counts[GAUSSIAN] / counts[DETERMINISTIC] < 1.02
    assert counts[DETERMINISTIC] < counts[BATCH_ENSEMBLE] < counts[GAUSSIAN]


def test_dropout_is_between_the_convolutions_of_a_block(session):
    model = recipe(session, MAIN, "MC dropout").build((1, 8, 8), 10, 0)
    names = [name for name, _ in converted_layers(model)]
    assert names and all(name.endswith("norm2") for name in names) and len(names) == 3


def images(name, count=6):
    generator = torch.Generator().manual_seed(0)
    split = Split(
        torch.randint(256, (count, 3, 32, 32), generator=generator, dtype=torch.uint8), torch.arange(count)
    )
    classes = tuple(map(str, range(10)))
    return Dataset(
        name, "classification", "image", split, split, Scaling((0.5,) * 3, (0.2,) * 3, 1 / 255), classes
    )


def test_types_of_corruption(monkeypatch):
    gpu = Session("gpu", "work")
    monkeypatch.setattr(
        rank1_measures, "prepare", lambda session, setting: Prepared(images(setting), images(setting).test)
    )
    ten = [shift.name for shift in rank1_measures.shifts(gpu, MAIN)]
    hundred = [shift.name for shift in rank1_measures.shifts(gpu, MORE)]
    assert len(ten) == 15 and len(hundred) == 17
    assert set(ten) - set(hundred) == {"motion_blur", "snow"}
    assert set(hundred) - set(ten) == {"speckle_noise", "gaussian_blur", "spatter", "saturate"}


def test_what_is_measured_is_that_of_the_predictions(session):
    job = Job(MAIN, BATCH_ENSEMBLE, 0)  # without noise: predictions can be made again
    trained = rank1_recipes.train(session, job)
    found = rank1_measures.clean(session, trained, job)
    data = rank1_recipes.prepare(session, MAIN).data
    p = sb.predict(trained.model, data.scaling(data.test.inputs))
    assert found["nll"] == pytest.approx(sb.metrics.nll(p.mean, data.test.targets), rel=1e-4)
    assert found["accuracy"] == pytest.approx(100 * sb.metrics.accuracy(p.mean, data.test.targets), rel=1e-4)
    assert found["ece"] == pytest.approx(sb.metrics.ece(p.mean, data.test.targets), abs=2e-3)
    members = p.draws.softmax(-1)
    wanted = sb.metrics.disagreement(members, data.test.targets)
    assert found["disagreement"] == pytest.approx(wanted, rel=1e-3)
    shifted = rank1_measures.on_corrupted(session, trained, job)
    shift = rank1_measures.shifts(session, MAIN)[1]
    few = data.test[: SIZES[MAIN, "smoke"].corrupted]
    changed = shift.apply(few, 4, seed=0)
    q = sb.predict(trained.model, data.scaling(changed.inputs)).mean
    assert shifted[shift.name][3]["nll"] == pytest.approx(sb.metrics.nll(q, few.targets), rel=1e-4)
    assert set(averaged(shifted)) == {"c_nll", "c_accuracy", "c_ece"}


def test_networks_are_looked_at_while_they_train(session):
    for label, seen in ((BATCH_ENSEMBLE, True), (GAUSSIAN, True), (DETERMINISTIC, False)):
        probes = rank1_recipes.train(session, Job(MAIN, label, 0)).probes
        assert list(probes) == ["2", "4"]
        for probe in probes.values():
            assert {"nll", "member_nll", "accuracy", "seconds"} <= set(probe)
            assert ("spread" in probe) == ("disagreement" in probe) == seen
            assert not seen or 0.1 < probe["spread"] < 1.0


def test_the_spread_of_components():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    model = sb.bayesianize(copy.deepcopy(net), sb.Rank1(components=3, random_sign_init=-0.5))
    found = sb.analysis.component_spread(model)
    assert list(found) == ["0", "2"] and set(found["0"]) == {"r", "s"}
    loc = model[0].bayes.r.loc.detach()
    wanted = ((loc - loc.mean(0)).square().sum(0) / 2).sqrt().mean()
    assert found["0"]["r"] == pytest.approx(float(wanted), rel=1e-6)
    with torch.no_grad():
        for layer in (model[0], model[2]):
            for factor in (layer.bayes.r, layer.bayes.s):
                factor.loc.copy_(factor.loc[:1].expand_as(factor.loc))
    assert all(v == 0 for layer in sb.analysis.component_spread(model).values() for v in layer.values())
    assert sb.analysis.component_spread(sb.bayesianize(copy.deepcopy(net), sb.MeanField())) == {}
    assert sb.analysis.component_spread(sb.bayesianize(copy.deepcopy(net), sb.Rank1(components=1))) == {}
    one = sb.bayesianize(copy.deepcopy(net), sb.Rank1(components=2, factors="input"))
    assert set(sb.analysis.component_spread(one)["0"]) == {"s"}


def table(**rows):
    made = Table("t", "T", ("nll", "ece", "c_nll", "c_ece", "accuracy", "disagreement"))
    names = {"normal": GAUSSIAN, "cauchy": rank1_recipes.CAUCHY, "be": BATCH_ENSEMBLE, "det": DETERMINISTIC}
    for key, values in rows.items():
        for value in values:
            made.add(names[key], dict.fromkeys(made.columns, value), {})
    return made


def test_orders_that_hold_and_orders_that_do_not():
    good = {"normal": [1, 1.1, 0.9], "cauchy": [1, 1.1, 0.9], "be": [2, 2.1, 1.9], "det": [3, 3.1, 2.9]}
    found = rank1_checks.order_checks(table(**good))
    assert len(found) == 12 and all(check["holds"] for check in found)
    for key in ("normal", "cauchy", "be"):
        worse = {**good, key: [4, 4.1, 3.9]}
        assert any(not check["holds"] for check in rank1_checks.order_checks(table(**worse)))
    close = {**good, "be": [1.0, 1.2, 0.9]}
    assert [c["holds"] for c in rank1_checks.order_checks(table(**close))][:3] == [False, False, True]
    few = {key: values[:2] for key, values in good.items()}
    assert not any(check["holds"] for check in rank1_checks.order_checks(table(**few)))
    assert all("3 seeds or more" in check["bound"] for check in rank1_checks.order_checks(table(**few)))
    # Of the same networks, seed by seed, a small gain counts where it is always there.
    gains = ([1.0, 2.0, 3.0], [1.1, 2.11, 3.1])
    assert (
        not rank1_checks.ahead("x", *gains)["holds"] and rank1_checks.ahead("x", *gains, paired=True)["holds"]
    )


def test_the_papers_own_network_has_bounds_of_its_own():
    wide = jobs_of(Session("gpu", "work"), WIDE)
    assert [job.label for job in wide] == [DETERMINISTIC, GAUSSIAN] and jobs_of(
        Session("desk", "work"), WIDE
    ) == []
    assert recipe(Session("gpu", "work"), WIDE, GAUSSIAN).network == "wrn(depth=28, width=10)"
    trained = {
        label: recipe(Session("gpu", "work"), WIDE, label).training for label in (DETERMINISTIC, GAUSSIAN)
    }
    assert {(made.batch_size, made.lr) for made in trained.values()} == {(512, 0.2)}
    assert [made.split_batch for made in trained.values()] == [False, True]
    # factors learn as fast as in the paper's steps of 128 images
    assert trained[GAUSSIAN].lr * trained[GAUSSIAN].factor_lr_multiplier == pytest.approx(0.1)
    for nll, accuracy, ece, wanted in ((0.14, 96.0, 0.01, [True] * 3), (0.16, 95.0, 0.02, [False] * 3)):
        made = Table("t", "T", ("nll", "accuracy", "ece"))
        made.add(GAUSSIAN, {"nll": nll, "accuracy": accuracy, "ece": ece}, {})
        assert [check["holds"] for check in rank1_checks.absolute_checks(made)] == wanted


def test_more_disagreement_counts_at_equal_accuracy():
    better = rank1_checks.disagreement_checks(table(normal=[2, 2.1, 1.9], be=[1, 1.1, 0.9]))
    assert [check["holds"] for check in better] == [True, True]
    worse = rank1_checks.disagreement_checks(table(normal=[1, 1.1, 0.9], be=[2, 2.1, 1.9]))
    assert [check["holds"] for check in worse] == [False, False]


def test_members_of_an_ensemble_train_as_if_alone(session):
    """From the same weights, on the same batches without augmentation, member 0 follows the single network."""
    found = []
    for label in (DETERMINISTIC, "Ensemble 4×WRN-28-10"):
        made = recipe(session, MAIN, label)
        model, single = made.build((1, 8, 8), 10, 0), recipe(session, MAIN, DETERMINISTIC).training
        training = dataclasses.replace(
            made.training, augment=False, steps=3, batch_size=64, precision="64-true"
        )
        assert (single.schedule, single.optimizer) == (training.schedule, training.optimizer)
        data = dataclasses.replace(load_data("digits"), augment=())
        sb.fit(model.double(), data, training, progress=False)
        found.append({name: p.detach() for name, p in model.named_parameters() if p.dim() > 1})
    alone, members = found
    for name, weight in alone.items():
        stacked = next(v for k, v in members.items() if k.endswith(name) and v.numel() == 4 * weight.numel())
        torch.testing.assert_close(stacked.reshape(4, *weight.shape)[0], weight, rtol=1e-6, atol=1e-8)


def test_steps_are_recorded_on_a_gpu_where_they_can_be():
    gpu = Session("gpu", "work")
    gpu.device = torch.device("cuda")
    recorded = {label: recipe(gpu, ABLATIONS, label).training.capture for label in rows_of(ABLATIONS)}
    assert [label for label, yes in recorded.items() if not yes] == ["K = 16, 4 per step"]
    assert not recipe(Session("smoke", "work"), MAIN, GAUSSIAN).training.capture


def test_a_scale_may_leave_rows_out():
    gpu = Session("gpu", "work")
    assert {job.label for job in jobs_of(gpu, MORE)} == set(SIZES[MORE, "gpu"].rows)
    assert {job.seed for job in jobs_of(gpu, MORE)} == {0, 1, 2}
    assert jobs_of(gpu, ABLATIONS, ("both", "K = 4")) == jobs_of(gpu, ABLATIONS, (GAUSSIAN,))


def test_figures_share_their_networks(session, tmp_path):
    folder, work = tmp_path / "results", session.work
    for name in ("rank1/figure4", "rank1/figure5"):
        reproduce(name, "smoke", folder, work, progress=False, only=(ABLATIONS if "4" in name else MAIN,))
    before = {path: path.stat().st_mtime_ns for path in work.rglob("run.json")}
    path = reproduce("rank1/figure4", "smoke", folder, work, progress=False)
    assert {path: path.stat().st_mtime_ns for path in work.rglob("run.json")} == before
    document = sb.experiments.read_result(path)
    lines = document["curves"][0]["lines"]
    assert [line["label"] for line in lines] == [
        "Average, mixture", "Average, members", "Mixture, mixture", "Mixture, members",
    ]  # fmt: skip
    for mixture, members in (lines[:2], lines[2:]):
        assert all(a <= b + 1e-6 for a, b in zip(mixture["y"][0], members["y"][0], strict=True)), "Jensen"


def test_the_search_looks_at_held_out_images_alone(session, tmp_path):
    path = reproduce("rank1/tuning", "smoke", tmp_path, session.work, progress=False)
    document = sb.experiments.read_result(path)
    (table,) = document["tables"]
    assert "100 images held out" in table["title"] and len(table["rows"]) == 2
    best = [text for text in document["deviations"] if "the lowest NLL has" in text]
    assert best and all(row["label"] in best[0] for row in table["rows"])  # one row of each method
    prepared, data = rank1_recipes.prepare(session, TUNING), load_data("digits")
    job = next(job for job in jobs_of(session, TUNING) if job.label.startswith(DETERMINISTIC))
    trained = rank1_recipes.train(session, job)

    def nll(rows):
        with torch.no_grad():
            logits = trained.model(prepared.data.scaling(rows.inputs))
        return pytest.approx(float(nn.functional.cross_entropy(logits, rows.targets)), rel=1e-4)

    found = {row["label"]: row["values"]["nll"] for row in table["rows"]}
    assert found[job.label] == [nll(prepared.validation)]
    seen = trained.probes[max(trained.probes, key=int)]["nll"]
    assert seen == nll(prepared.validation[: SIZES[TUNING, "smoke"].probed])
    assert torch.equal(prepared.validation.inputs, data.train.inputs[-100:])
    assert len(prepared.data.train) == len(data.train) - 100


def test_digits_are_the_data_of_smoke_runs(session):
    assert rank1_recipes.prepare(session, MORE).data.name == load_data("digits").name


def test_a_spread_that_the_kl_does_not_explain_is_said():
    table = Table("x", "X", ("spread", "predicted", "ece", "c_ece"))
    rows = {
        "KL summed": (0.03, 0.04, 0.02), "KL averaged": (0.2, 0.25, 0.01), "KL at once": (0.002, 0.0004, 0.03),
        BATCH_ENSEMBLE: (0.36, 0.45, 0.01),
    }  # fmt: skip
    for seed in range(3):
        for label, (spread, predicted, ece) in rows.items():
            values = {"spread": spread, "predicted": predicted, "ece": ece + seed / 1e4, "c_ece": 10 * ece}
            table.add(label, values, {})
    held = {check["what"]: check["holds"] for check in rank1_checks.collapse_checks(table)}
    assert len(held) == 6 and sum(held.values()) == 5
    assert next(words for words, holds in held.items() if not holds).startswith("X, KL at once: spread over")

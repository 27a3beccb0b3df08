"""The catalogue of experiments: whole, readable by the library, and right where numbers can check each other."""

import dataclasses
import math

import pytest

import slimbayes as sb
from slimbayes.lab.data.corruptions import CORRUPTIONS
from slimbayes.lab.experiments import COLUMNS, ENTRIES, PAPERS, find
from slimbayes.lab.experiments.running import RUNNERS
from slimbayes.verbs.method_text import parse_stored

KTIED = """table1 figure3 figure4 table2 figure5 table3 figure6 figure7 table4 table5 figure9 figure10 figure11
    figure12 local by-elbo time compress tuning"""
RANK1 = """figure1 figure2 figure3 figure4 figure-v1-5 figure5 figure6 figure7 figure9 figure10 figure11 figure12
    table1 table2 table3 table4 table5 table6 table7 table8 theorem1 collapse tuning shared ood"""
EMP = """figure1 table1 figure3 table3 table4 figure4 figure7 table5 table7 table8 table6 figure5 figure6 table9
    table10 table11 table12 table13 extras"""
ITEMS = [
    f"{paper}/{item}"
    for paper, items in (("ktied", KTIED), ("rank1", RANK1), ("emp", EMP))
    for item in items.split()
]
BEYOND = {
    "ktied/local", "ktied/by-elbo", "ktied/time", "ktied/compress", "ktied/tuning", "rank1/collapse", "rank1/tuning",
    "rank1/shared", "rank1/ood", "emp/extras",
}  # fmt: skip
SETTINGS = [(entry, setting) for entry in ENTRIES.values() for setting in entry.settings]
# What a setting may hold beside the fields of sb.Training
OTHERS = {
    "prior scale",
    "kl_coefficient",
    "kl_every",
    "kl_annealing_steps",
    "time bags, s",
    "hidden layer",
    "embedding multiplier",
    "aggregate older than, s",
    "precision of the output",
}


def test_every_item_of_the_three_papers_is_there_in_order():
    assert list(ENTRIES) == ITEMS
    assert list(dict.fromkeys(name.split("/")[0] for name in ENTRIES)) == list(PAPERS)
    assert all(entry.name == name for name, entry in ENTRIES.items())
    assert {name for name, entry in ENTRIES.items() if entry.beyond} == BEYOND


def test_find_names_the_closest():
    assert find("rank1/theorem1") is ENTRIES["rank1/theorem1"]
    with pytest.raises(ValueError, match=r"no experiment 'emp/tabel12'; the closest are .*emp/table12"):
        find("emp/tabel12")
    with pytest.raises(ValueError, match=r"no experiment 'KTIED/Table2'; the closest are ktied/table2"):
        find("KTIED/Table2")
    with pytest.raises(ValueError, match=r"no experiment '17'; slimbayes reproduce --list shows them all"):
        find("17")


@pytest.mark.parametrize("name", ITEMS)
def test_entry_is_whole(name):
    entry = ENTRIES[name]
    assert entry.paper is PAPERS[name.split("/")[0]]
    for sentence in (entry.shows, *entry.errata):
        assert sentence == sentence.strip() and sentence.endswith(".") and len(sentence) > 15, sentence
    assert len(set(entry.errata)) == len(entry.errata)
    assert entry.title and entry.seeds >= 1 and set(entry.metrics) <= set(COLUMNS)
    assert bool(entry.needs) == (name not in RUNNERS)
    names = [setting.name for setting in entry.settings]
    assert len(set(names)) == len(names)
    tables = [table.name for table in entry.printed]
    assert len(set(tables)) == len(tables)
    if not name.startswith("ktied/") and not entry.printed and entry.settings and not entry.beyond:
        assert any("draws" in sentence for sentence in entry.errata)
    for table in entry.printed:
        assert table.rows and set(table.errors) <= set(table.rows)
        assert not table.errors or table.error_of
        for row in table.rows:
            for column in table.columns:
                value, error = table.value(row, column), table.error(row, column)
                assert value is None or math.isfinite(value)
                assert error is None or (math.isfinite(error) and error >= 0 and value is not None)
        assert all(any(value is not None for value in cells) for cells in table.rows.values())


def test_methods_can_be_read():
    texts = {text for _, setting in SETTINGS for text in setting.methods.values()}
    assert len(texts) > 40
    for text in texts:
        parse_stored(text)


def test_training_values_are_those_of_the_training_loop():
    fields = {field.name for field in dataclasses.fields(sb.Training)}
    for entry, setting in SETTINGS:
        assert set(setting.training) - fields <= OTHERS, (entry.name, setting.name)
        known = {key: value for key, value in setting.training.items() if key in fields}
        first = {key: value[0] if isinstance(value, tuple) else value for key, value in known.items()}
        sb.Training(**first)
        assert setting.samples >= 1 and setting.inputs


@pytest.mark.parametrize("name", ["ktied/figure6", "ktied/table4", "rank1/table1", "rank1/table2", "rank1/table3",
                                  "rank1/table8", "emp/table3", "emp/table4", "emp/table5", "emp/table6",
                                  "emp/table7", "emp/table8"])  # fmt: skip
def test_methods_are_rows_of_the_printed_table(name):
    entry = ENTRIES[name]
    labels = {label for setting in entry.settings for label in setting.methods}
    quoted = {"MCMC, 9 samples", "MCMC, 30 samples"}
    assert labels == set(entry.printed[0].rows) - quoted


def spot(text):
    entry, table, row, column, value = (part.strip() for part in text.split("|"))
    return pytest.param(entry, table, row, column, float(value), id=text)


@pytest.mark.parametrize(
    ("entry", "table", "row", "column", "value"),
    [
        spot("ktied/table2 | mnist | Mean-field | nll | 0.100"),
        spot("ktied/table2 | cifar100 | 1-tied | neg_elbo | 4.33"),
        spot("ktied/table2 | imdb | 2-tied | neg_elbo | 0.621"),
        spot("ktied/figure5 | resnet | 2-tied | neg_elbo | 122.77"),
        spot("ktied/table3 | resnet | 1-tied | ece | 0.1642"),
        spot("ktied/table3 | resnet | Mean-field | brier | -0.761"),
        spot("ktied/figure6 | mnist | 3-tied | nll | 0.120"),
        spot("ktied/figure6 | cifar100 | 1-tied | accuracy | 45.5"),
        spot("ktied/figure6 | imdb | 3-tied | nll | 0.491"),
        spot("ktied/figure6 | snr | 2-tied | 1000 | 7500"),
        spot("ktied/figure6 | convergence | 3-tied | 9000 | 1.80"),
        spot("ktied/table4 | step | Mean-field | step_ms | 7.17"),
        spot("ktied/figure9 | resnet-he | 1-tied | nll | 1.485"),
        spot("rank1/table1 | imagenet | Rank-1 Gaussian | mce | 72.12"),
        spot("rank1/table1 | imagenet | Ensemble 4×ResNet-50 | ece | 0.0305"),
        spot("rank1/table1 | readme | Ensemble 4×ResNet-50 | nll | 0.857"),
        spot("rank1/table2 | cifar10 | BatchEnsemble | c_nll | 1.02"),
        spot("rank1/table2 | readme | BatchEnsemble | c_nll | 0.97"),
        spot("rank1/table3 | cifar100 | MC dropout | c_accuracy | 51.5"),
        spot("rank1/table4 | test | Rank-1 Cauchy | auc_pr | 0.383"),
        spot("rank1/table5 | hyper-parameters | prior standard deviation | CIFAR-100, Cauchy | 0.01"),
        spot("rank1/table6 | hyper-parameters | random sign init | Normal | -0.75"),
        spot("rank1/table7 | hyper-parameters | KL annealing, steps | Cauchy | 694216"),
        spot("rank1/table8 | cifar10 | 25 samples | c_ece | 0.070"),
        spot("emp/table4 | imagenet | ECMP (BN+out) | ece_percent | 1.65"),
        spot("emp/table7 | imagenet-c | EMP (BN) | pixelate | 90.8"),
        spot("emp/table8 | imagenet-c | Dropout | brightness | 114"),
        spot("emp/table9 | cifar100 | S = 20 | accuracy | 73.2"),
        spot("emp/figure6 | imagenet | ECMP | 100 | 1.50"),
        spot("emp/table12 | rmse | Yacht | Ensemble | 29.48"),
        spot("emp/table13 | lpd | Concrete | EMP | -3.59"),
    ],
)
def test_printed_numbers(entry, table, row, column, value):
    assert ENTRIES[entry].table(table).value(row, column) == value


def test_the_readmes_numbers_are_called_so():
    tables = [t for entry in ENTRIES.values() for t in entry.printed if t.name in ("readme", "hours")]
    assert len(tables) == 4
    assert all("not the paper's numbers" in table.title for table in tables)


# Numbers that check each other


def test_errors_of_accuracies_are_over_test_examples():
    """sqrt(p (1 − p) / n): a slip in an accuracy or its error would show."""
    examples = {"mnist": 10_000, "cifar100": 10_000, "imdb": 25_000, "resnet": 10_000, "resnet-he": 10_000}
    seen = 0
    for name, entry in ENTRIES.items():
        for table in entry.printed if name.startswith("ktied/") else ():
            for row in table.rows if "accuracy" in table.columns else ():
                p, error = table.value(row, "accuracy") / 100, table.error(row, "accuracy")
                binomial = 100 * (p * (1 - p) / examples[table.name]) ** 0.5
                assert error == pytest.approx(binomial, abs=0.0075), (name, table.name, row)
                seen += 1
    assert seen == 4 * (3 + 1 + 3 + 1 + 1 + 4)


@pytest.mark.parametrize("item", ["table5", "table7", "table8"])
def test_mean_corruption_errors_are_means(item):
    (table,) = ENTRIES[f"emp/{item}"].printed
    assert table.columns[1:] == CORRUPTIONS
    for row, (mean, *types) in table.rows.items():
        assert mean == pytest.approx(sum(types) / 15, abs=0.6), row  # types are printed to 0.1 or 1


def test_tables_by_samples_end_at_those_of_200():
    for item, method in (("table9", "EMP"), ("table10", "ECMP"), ("table11", "Dropout")):
        for name, main in (("imagenet", "emp/table4"), ("cifar100", "emp/table6")):
            label = f"{method} (BN+out)" if name == "imagenet" and method != "Dropout" else method
            last = ENTRIES[f"emp/{item}"].table(name).rows
            reference = ENTRIES[main].table(name).rows
            assert last["S = 200"] == reference[label][1:]
            assert last["Vanilla"] == reference["Vanilla"][1:]


def test_hyper_parameter_tables_are_those_of_the_settings():
    """The settings have the errata applied: learning-rate steps of 250 epochs, which the table gives for 200."""
    for name, prior in (("rank1/table5", "CIFAR"), ("rank1/table6", "")):
        entry = ENTRIES[name]
        (table,) = entry.printed
        for setting in entry.settings:
            (text,) = setting.methods.values()
            method = parse_stored(text)
            family = "Cauchy" if method.posterior == "cauchy" else "Normal"
            classes = setting.data.removeprefix("cifar")
            column = f"{prior}-{classes}, {family}" if prior else family

            def printed(row, table=table, column=column):
                return table.value(row, column)

            assert method.prior.scale == printed("prior standard deviation")
            assert method.prior.loc == printed("prior mean")
            assert method.dropout_rate == printed("dropout rate at the start")
            assert method.random_sign_init == printed("random sign init")
            assert method.components == printed("components")
            training = setting.training
            rows = printed("batch size per core") * printed("cores")
            assert training["batch_size"] * method.components == rows
            assert (training["l2"], training["decay"]) == (printed("l2"), printed("learning rate decay"))
            assert training["epochs"] == printed("epochs")
            assert training["kl_annealing"] * training["epochs"] == pytest.approx(
                printed("KL annealing, epochs")
            )
            drops = [printed(f"{which} decay, epoch") for which in ("first", "second", "third")]
            stretch = 250 / 200 if prior else 1
            assert [m * training["epochs"] for m in training["milestones"]] == pytest.approx(
                [stretch * drop for drop in drops]
            )
            assert training["lr"] == pytest.approx(0.1 * training["batch_size"] / (128 if prior else 256))

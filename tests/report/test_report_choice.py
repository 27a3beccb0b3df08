"""The first line, "which should I take?": each branch of its rule on numbers made by hand."""

import pytest

from slimbayes.lab.report import choose

SPREAD = (-0.01, 0.0, 0.01)  # over three seeds, so that a difference has a standard error of 0.0058


def method(name, clean, shifted, train=1.0, predict=1.0, seeds=3, held=None, spread=SPREAD):
    """A method whose runs have these NLLs, each seed a little off; ``held``: clean and shifted on validation rows."""
    runs = []
    for seed in range(seeds):
        off = spread[seed]

        def figures(clean, shifted, off=off):
            return {"clean": {"nll": clean + off}, "shifted": {"noise": {"1": {"nll": shifted + off}}}}

        run = {"seed": seed, "train_seconds": train, "predict_seconds": predict, **figures(clean, shifted)}
        runs.append(run | ({"validation": figures(*held)} if held else {}))
    return {"name": name, "runs": runs}


def document(*methods):
    return {"format": "slimbayes-results", "version": 1, "task": "classification", "methods": list(methods)}


def plain(held=(0.5, 1.0), **options):
    return method("Deterministic", 0.5, 1.0, held=held, spread=(0.0, 0.0, 0.0), **options)


def chosen(*methods, base=None):
    return choose(document(base or plain(), *methods))


def test_the_sentence_names_gain_and_cost():
    found = chosen(method("Rank1", 0.48, 0.9, train=1.5, predict=4.04, held=(0.5, 0.9)))
    assert found.method == "Rank1"
    assert found.text == (
        "Take Rank1: it lowers NLL by 0.060 ± 0.006 (mean of clean, −0.020, and shifted, −0.100; 3 seeds, paired with "
        "the plain network), costs 1.5 times the training and 4 times the prediction."
    )
    slow = method("Rank1", 0.48, 0.9, train=1.5, predict=4.04)
    slow["runs"][0]["train_seconds"] = 60.0  # a first run that warmed up
    assert "costs 1.5 times the training" in chosen(slow).text
    assert "two standard errors (4.3 with 3 seeds, Student's t)" in found.rule


def test_nothing_beats_the_plain_network():
    """A difference of 0.01 with a standard error of 0.0058: beyond one, within Student's 4.3 of three seeds."""
    found = chosen(method("Rank1", 0.5, 0.98), method("EMP", 0.6, 1.1))
    assert found.method is None
    assert found.text == (
        "Nothing beats the plain network here by two standard errors (closest: Rank1, −0.010 ± 0.006; 3 seeds)."
    )


def test_a_worse_clean_nll_is_left_out():
    found = chosen(method("KTied", 0.6, 0.5), method("Rank1", 0.5, 0.9))
    assert found.method == "Rank1" and "Left out for a higher clean NLL: KTied." in found.rule
    alone = chosen(method("KTied", 0.6, 0.5))
    assert alone.method is None and "closest: KTied, −0.200 ± 0.006, with a higher clean NLL" in alone.text


def test_ties_go_to_the_cheaper():
    """The lowest by 0.005 costs twelve times as much; by 0.2 it is worth it."""
    spread = (0.01, -0.01, 0.0)  # unlike the other's, so that their difference has an error too
    cheap = method("Rank1", 0.45, 0.9, train=1.5, predict=2.0, spread=spread)
    found = chosen(cheap, method("EMP", 0.445, 0.895, train=6.0, predict=6.0))
    assert found.method == "Rank1" and "EMP is within error of Rank1 and costs more." in found.rule
    far = chosen(cheap, method("EMP", 0.3, 0.8, train=6.0, predict=6.0))
    assert far.method == "EMP" and "within error of Rank1" not in far.rule
    unknown = chosen(
        method("Rank1", 0.45, 0.9, train=None, spread=spread), method("EMP", 0.445, 0.895, train=None)
    )
    assert unknown.method == "EMP" and "costs" not in unknown.text  # without times, the lowest


def test_the_ensemble_is_named_with_its_cost():
    ensemble = method("DeepEnsemble", 0.45, 0.7, train=4.0, predict=4.0)
    cheap = method("Rank1", 0.45, 0.7, train=1.1, predict=3.0, spread=(0.01, -0.01, 0.0))
    words = "; DeepEnsemble lowers it by 0.175 ± 0.006 at 4 times the training and 4 times the prediction."
    assert chosen(ensemble, cheap).text.endswith(words)
    alone = chosen(ensemble).text
    assert alone.startswith("Take DeepEnsemble") and alone.endswith(
        "costs 4 times the training and 4 times the prediction."
    )
    both = chosen(ensemble, method("Rank1", 0.48, 0.9, train=1.1, predict=3.0)).text
    assert both.startswith("Take DeepEnsemble")
    assert "; of single networks Rank1 lowers it by 0.060 ± 0.006 at 1.1 times the training and 3" in both


def test_validation_rows_choose_and_test_rows_report():
    """On the test rows EMP is ahead, on the validation rows Rank1."""
    rank1 = method("Rank1", 0.49, 0.95, held=(0.4, 0.8))
    emp = method("EMP", 0.4, 0.8, held=(0.49, 0.95))
    found = chosen(rank1, emp)
    assert found.method == "Rank1" and "lowers NLL by 0.030" in found.text
    assert (
        "Chosen on validation rows, held out of the training data; the figures are of the test rows"
        in found.rule
    )
    del emp["runs"][1]["validation"]  # not measured everywhere
    found = chosen(rank1, emp)
    assert found.method == "EMP" and "Chosen on the same test rows" in found.rule
    emp["runs"][1]["validation"] = {"clean": {"nll": 0.5}, "shifted": {}}
    assert "Chosen on the same test rows" in chosen(rank1, emp).rule


def test_nothing_to_say():
    assert (
        "the plain network (Deterministic) was not run"
        in choose(document(method("A", 0, 0), method("B", 0, 0))).text
    )
    assert choose(document(plain())).text == "Nothing to choose from: Deterministic was run alone."
    one = chosen(method("Rank1", 0.4, 0.9, seeds=1), base=plain(seeds=1))
    assert "one seed per method has no standard error (lowest: Rank1, −0.110). Run more." in one.text
    broken = method("Rank1", 0.4, 0.9)
    broken["runs"][0]["clean"]["nll"] = None
    assert "no method has a finite NLL" in chosen(broken).text
    assert choose(document()).method is None


@pytest.mark.parametrize("part", [7, {"shifted": {"noise": 3}}, {"clean": [1]}])
def test_a_damaged_validation_part_is_refused(part):
    from slimbayes.lab.report import ReportError

    found = document(plain(), method("Rank1", 0.4, 0.9))
    found["methods"][1]["runs"][0]["validation"] = part
    with pytest.raises(ReportError, match="validation"):
        choose(found)

"""Where a result comes from."""

import pytest

from slimbayes.verbs import provenance


@pytest.mark.parametrize(
    ("named", "found"), [("0123abc", "0123abc"), (" 0123abc+\n", "0123abc+"), (" ", None)]
)
def test_the_commit_of_a_copy_is_named_by_the_environment(monkeypatch, tmp_path, named, found):
    monkeypatch.setattr(
        provenance, "__file__", str(tmp_path / "src" / "slimbayes" / "verbs" / "provenance.py")
    )
    monkeypatch.setenv("SLIMBAYES_COMMIT", named)
    assert provenance.commit() == found and provenance.provenance()["commit"] == found


def test_a_checkout_with_its_history_names_its_own_commit(monkeypatch, tmp_path):
    """A variable that was forgotten does not make a result lie."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(
        provenance, "__file__", str(tmp_path / "src" / "slimbayes" / "verbs" / "provenance.py")
    )
    monkeypatch.setattr(provenance, "_git", lambda root, *words: "feedc0de" if "rev-parse" in words else "")
    monkeypatch.setenv("SLIMBAYES_COMMIT", "stale")
    assert provenance.commit() == "feedc0de"

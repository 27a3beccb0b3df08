"""Where a result comes from."""

import pytest

from slimbayes.provenance import commit, provenance


@pytest.mark.parametrize(("named", "found"), [("0123abc", "0123abc"), (" 0123abc+\n", "0123abc+")])
def test_the_commit_of_a_copy_is_named_by_the_environment(monkeypatch, named, found):
    monkeypatch.setenv("SLIMBAYES_COMMIT", named)
    assert commit() == found and provenance()["commit"] == found


def test_an_empty_name_is_none(monkeypatch):
    monkeypatch.delenv("SLIMBAYES_COMMIT", raising=False)
    before = commit()
    monkeypatch.setenv("SLIMBAYES_COMMIT", " ")
    assert commit() == before

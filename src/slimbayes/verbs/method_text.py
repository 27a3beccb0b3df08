"""Methods as text: ``Rank1(components=4, prior=Normal(0, 1))``, read without executing anything."""

from __future__ import annotations

import ast
import difflib
import inspect
from typing import Any

from slimbayes.core.methods import METHODS, Method
from slimbayes.core.methods.base import as_written
from slimbayes.core.priors import PRIORS
from slimbayes.files import shortened

_LONGEST = 10_000  # characters of a method or network


class SpecError(ValueError):
    """A text that names no method or network, with what would."""


def parse_method(text: str) -> Method:
    """The method that a text describes, as one would write it in Python.

    >>> parse_method("KTied.paper(rank=3, temperature=0.1)")
    KTied(rank=3, prior=Normal(loc=0.0, scale=0.3), stddev_init=0.01, ..., temperature=0.1, spread_rate=1.0)
    >>> parse_method("Rank2")
    Traceback (most recent call last):
        ...
    slimbayes.verbs.method_text.SpecError: unknown method 'Rank2'; did you mean 'Rank1'? Known: Rank1, ...
    """
    return _parsed(text, stored=False)


def parse_stored(text: str) -> Method:
    """The method of a text in a file, or of a paper's experiment: options that it leaves out have the papers' values.

    They were the defaults when texts were written with gaps; ``full_text`` has none.

    >>> parse_stored("Rank1(components=2)") == parse_method("Rank1.paper(components=2)")
    True
    """
    return _parsed(text, stored=True)


def full_text(method: str | Method) -> str:
    """A method as a text that names every option, and so means the same whatever the defaults will be.

    >>> full_text("BatchEnsemble(8)")
    'BatchEnsemble(components=8, random_sign_init=-0.5)'
    """
    return repr(parse_method(method) if isinstance(method, str) else method)


def _parsed(text: str, stored: bool) -> Method:
    if not isinstance(text, str):
        raise SpecError(f"a method is a text such as 'Rank1(components=4)', got {text!r}")
    name, arguments, options = named_call(text, "method")
    name, _, variant = name.partition(".")
    if name not in METHODS:
        raise SpecError(unknown_name("method", name, METHODS))
    kind = METHODS[name]
    papers = [f"{other}.paper" for other in METHODS if hasattr(METHODS[other], "paper")]
    if variant and f"{name}.{variant}" not in papers:
        raise SpecError(
            f"{_shorten(text)}: after a dot stands paper, for the papers' values: {', '.join(papers)}"
        )
    try:
        given = inspect.signature(kind).bind(*arguments, **options).arguments
        return (as_written(kind) if stored or variant else kind)(**given)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:  # prior=5 has no distribution
        raise SpecError(f"{_shorten(text)}: {shortened(error)}") from error


def named_call(text: str, what: str) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the arguments and the options of ``Name(1, option=2)``; ``what`` it is, for errors.

    >>> named_call("wrn(depth=16)", "network")
    ('wrn', [], {'depth': 16})
    """
    if len(text) > _LONGEST:
        raise SpecError(
            f"the {what} {_shorten(text)} has {len(text):,} characters: write at most {_LONGEST:,}"
        )
    try:
        node = ast.parse(text.strip(), mode="eval").body
        called = node.func if isinstance(node, ast.Call) else node
        name = ast.unparse(called) if isinstance(called, ast.Name | ast.Attribute) else ""
        if all(part.isidentifier() for part in name.split(".")):
            call = node if isinstance(node, ast.Call) else ast.Call(called, [], [])
            return name, [_value(argument) for argument in call.args], _options(call)
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        raise SpecError(f"the {what} {_shorten(text)} cannot be read: {str(error)[:200]}") from error
    raise SpecError(
        f"the {what} {_shorten(text)} cannot be read: write a name with options, as in Name(option=1)"
    )


def _value(node: ast.expr) -> Any:
    """A literal, or a prior such as Normal(0, 1)."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PRIORS:
        return PRIORS[node.func.id](*[_value(argument) for argument in node.args], **_options(node))
    try:
        return ast.literal_eval(node)
    except ValueError:
        known = ", ".join(PRIORS)
        raise ValueError(f"{ast.unparse(node)} is neither a literal nor a prior ({known})") from None


def _options(call: ast.Call) -> dict[str, Any]:
    names = [keyword.arg for keyword in call.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError("options are written by name, each once")
    return {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def unknown_name(what: str, name: str, known: dict[str, Any]) -> str:
    """That there is no ``what`` of this name, and which name was perhaps meant."""
    lower = {key.lower(): key for key in known}
    close = difflib.get_close_matches(name.lower(), lower, 1)
    hint = f" did you mean {lower[close[0]]!r}?" if close else ""
    return f"unknown {what} {_shorten(name)};{hint} Known: {', '.join(known)}"

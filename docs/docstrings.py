"""What the reference makes of docstrings: doctests are blocks of code, which Markdown would quote."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

SEVERAL = re.compile(r"^( +)(\w+(?:, \w+)+): (.+)$", re.M)  # "rank, world: ..." among the arguments
DOCTEST = re.compile(r"(?:^>>> .*(?:\n(?!\s*$).+)*)(?:\n+>>> .*(?:\n(?!\s*$).+)*)*", re.M)


def fenced(text: str) -> str:
    """The text with every doctest in a fence.

    >>> fenced("One.\\n\\n>" + ">> 1 + 1\\n2\\n\\nAfter.").splitlines()
    ['One.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'After.']
    """
    return DOCTEST.sub(lambda found: f"```pycon\n{found[0].strip()}\n```", text)


def one_by_one(text: str) -> str:
    """The text with a line for each of several arguments that share one.

    >>> print(one_by_one("Args:\\n    rank, world: this process and how many there are."))
    Args:
        rank: this process and how many there are.
        world: this process and how many there are.
    """
    head, mark, arguments = text.partition("Args:\n")
    split = SEVERAL.sub(
        lambda found: "\n".join(f"{found[1]}{name}: {found[3]}" for name in found[2].split(", ")), arguments
    )
    return head + mark + split


class Doctests(Extension):
    """Rewrite every docstring, once."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None and "```pycon" not in obj.docstring.value:
            obj.docstring.value = fenced(one_by_one(obj.docstring.value))

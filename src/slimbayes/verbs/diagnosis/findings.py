"""What looks wrong, in words: a finding, and all findings of a model."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

SEVERITIES = ("error", "warning", "notice")
_SHOWN = 4  # layers named in print for one kind of finding
_WIDTH = 100


class ModelWarning(UserWarning):
    """A trained model may be worse than it could be: what ``sb.fit`` says at its end."""


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong.

    ``kind`` is a short name for programs; ``value`` is what was measured and ``limit`` where it begins to look wrong.
    ``severity``: "error" (results mean nothing), "warning" (probably not what was wanted) or "notice" (maybe on
    purpose).
    """

    kind: str
    severity: str
    layer: str  # "" for the whole model
    what: str
    why: str
    remedy: str
    value: float
    limit: float

    def __str__(self) -> str:
        """One line."""
        where = f" [{self.layer}]" if self.layer else ""
        return f"{self.severity}: {self.kind}{where}: {self.what}. {self.why}. {self.remedy}."


@dataclass(frozen=True)
class Diagnosis:
    """Everything found in a model, the worst first; prints as text.

    >>> print(Diagnosis((), ("parameters", "spreads")))
    Nothing looks wrong. Looked at: parameters, spreads.
    """

    findings: tuple[Finding, ...]
    looked_at: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is neither an error nor a warning; notices may be there."""
        return all(finding.severity == "notice" for finding in self.findings)

    @property
    def kinds(self) -> set[str]:
        """The kinds of findings."""
        return {finding.kind for finding in self.findings}

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        """Findings of one kind together, with the layers that have them."""
        seen = f"Looked at: {', '.join(self.looked_at)}."
        if not self.findings:
            return f"Nothing looks wrong. {seen}"
        blocks = []
        for kind in dict.fromkeys(finding.kind for finding in self.findings):
            blocks.append(_block([finding for finding in self.findings if finding.kind == kind]))
        counts = {s: sum(finding.severity == s for finding in self.findings) for s in SEVERITIES}
        head = ", ".join(f"{n} {s}{'s' if n > 1 else ''}" for s, n in counts.items() if n)
        return "\n\n".join([f"{head}. {seen}", *blocks])


def _block(found: list[Finding]) -> str:
    first = found[0]
    lines = [f"{first.severity.upper()} {first.kind}"]
    for finding in found[:_SHOWN]:
        where = f"{finding.layer}: " if finding.layer else ""
        lines.append(
            textwrap.fill(f"{where}{finding.what}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
        )
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more layers alike")
    for label, text in (("Why: ", first.why), ("What to do: ", first.remedy)):
        lines.append(textwrap.fill(f"{label}{text}.", _WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)

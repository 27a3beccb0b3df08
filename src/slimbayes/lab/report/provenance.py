"""The end of the page: terms, and what made the results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slimbayes.lab.report.definitions import definitions
from slimbayes.lab.report.examples import text
from slimbayes.lab.report.results import Results, label, number


def pairs(items: Mapping[str, str], kind: str = "") -> str:
    """Names with their values, which are HTML already."""
    inner = "".join(f"<dt>{text(name)}</dt><dd>{value}</dd>" for name, value in items.items())
    return f'<dl class="pairs{kind}">{inner}</dl>\n'


def terms_html(results: Results) -> str:
    """Every term of the page with its meaning."""
    return pairs({name: text(meaning) for name, meaning in definitions(results.task).items()}, " terms")


def provenance_html(results: Results) -> str:
    """What made these results: command, commit, versions, seeds, hardware, data, configuration."""
    made, data = results.provenance, results.dataset
    wall = number(made.get("wall_seconds"))
    versions = made.get("versions") if isinstance(made.get("versions"), dict) else {}
    ood = results.data.get("ood") or {}
    code = {
        "Command": made.get("command"),
        "Commit": made.get("commit"),
        "Data fingerprint": data.get("fingerprint"),
    }
    values: dict[str, Any] = {
        "Created": results.data.get("created"),
        "Versions": ", ".join(f"{name} {version}" for name, version in (versions or {}).items()),
        "Seeds": ", ".join(map(str, results.seeds)),
        "Hardware": made.get("hardware"),
        "Wall time": f"{wall:,.0f} s" if wall is not None else None,
        "Data": f"{data.get('name', '')}. {data.get('source') or ''}".strip(". ") if data else None,
        "Out of distribution": ", ".join(str(ood[k]) for k in ("name", "description") if ood.get(k)),
        "Network": results.data.get("network"),
        "Joined from": ", ".join(map(str, made.get("joined_from") or [])),
    }  # fmt: skip
    items = {name: f"<code>{text(value)}</code>" for name, value in code.items() if value}
    items |= {name: text(value) for name, value in values.items() if value}
    missing = [name.lower() for name, value in code.items() if not value]
    gap = f'<p class="note">Not recorded: {", ".join(missing)}.</p>' if missing else ""
    settings = {label(m): m.get("settings") for m in results.methods if m.get("settings")}
    blocks = "".join(
        f"<h3>{title}</h3><pre>{text_block(content)}</pre>"
        for title, content in (("Configuration", made.get("config")), ("Settings of the methods", settings))
        if content
    )
    return pairs(items) + gap + blocks


def text_block(content: Any) -> str:
    """A nested document as indented text, escaped.

    >>> print(text_block({"lr": 0.1, "a": {"b": "<c>"}}))
    lr: 0.1
    a:
      b: "&lt;c&gt;"
    """
    lines: list[str] = []

    def walk(node: Mapping[str, Any], depth: int) -> None:
        for key, value in node.items():
            if isinstance(value, dict) and value:
                lines.append(f"{'  ' * depth}{text(key)}:")
                walk(value, depth + 1)
            else:
                lines.append(f"{'  ' * depth}{text(key)}: {_json(value)}")

    walk(content if isinstance(content, dict) else {"value": content}, 0)
    return "\n".join(lines)


def _json(value: Any) -> str:
    return text(json.dumps(value, ensure_ascii=False)).replace("&quot;", '"')

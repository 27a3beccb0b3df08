"""The examples that a model is least and most sure of, and those it was wrong and sure about, as HTML."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from slimbayes.lab.report.panels import png, printable
from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.tables import summary_rows

KINDS = {
    "classification": {
        "wrong": ("Wrong, and sure of it", "The most confident mistakes."),
        "least": ("Least sure", "The highest entropy."),
        "most": ("Most sure", "The lowest entropy."),
    },
    "regression": {
        "wrong": ("Furthest off", "Targets far from the prediction."),
        "least": ("Least sure", "The widest intervals."),
        "most": ("Most sure", "The narrowest intervals."),
    },
}
_SIDE = 64  # pictures larger than this are averaged down: the page stays small
_MOST = 8  # examples per group
_BARS = 4  # probabilities shown per example


def text(value: Any) -> str:
    """Anything from the file, safe between tags and inside quotes.

    >>> text("<b>&'")
    '&lt;b&gt;&amp;&#x27;'
    """
    return escape(printable(str(value)))


def picture(pixels: Any) -> bytes | None:
    """A PNG of uint8 pixels C×H×W (1 or 3 channels), or None if they are something else.

    >>> picture([[[0, 255], [255, 0]]])[:4], picture([1, 2])
    (b'\\x89PNG', None)
    """
    try:
        array = np.asarray(pixels, dtype=float)
    except (TypeError, ValueError):
        return None
    if array.ndim != 3 or array.shape[0] not in (1, 3) or 0 in array.shape or not np.isfinite(array).all():
        return None
    factor = -(-max(array.shape[1:]) // _SIDE)
    if factor > 1:
        c, h, w = array.shape[0], array.shape[1] // factor, array.shape[2] // factor
        if 0 in (h, w):
            return None
        blocks = array[:, : h * factor, : w * factor].reshape(c, h, factor, w, factor)
        array = blocks.mean(axis=(2, 4))  # [C, h, w]
    array = np.clip(np.round(array), 0, 255).astype(np.uint8)
    return png(array[0] if array.shape[0] == 1 else array.transpose(1, 2, 0))  # [H, W] or [H, W, 3]


def examples_html(results: Results) -> str:
    """One block per method that has examples, the best NLL first and open."""
    blocks = []
    rows = {row["name"]: row for row in summary_rows(results)}
    key = "shifted_nll" if any("shifted_nll" in row for row in rows.values()) else "clean_nll"
    scores = {name: row[key].mean for name, row in rows.items() if key in row and row[key].mean is not None}
    for method in results.methods:
        run = next((run for run in method["runs"] if any((run.get("examples") or {}).values())), None)
        if run is not None:
            blocks.append((scores.get(method["name"], float("inf")), method, run))
    blocks.sort(key=lambda block: block[0])  # a stable sort: ties stay in the file's order
    out = []
    for i, (_, method, run) in enumerate(blocks):
        groups = "".join(
            _group(results, kind, run["examples"].get(kind) or []) for kind in KINDS[results.task]
        )
        out.append(
            f"<details class='method'{'' if i else ' open'}><summary><h3>{text(label(method))}</h3>"
            f"<span class='note'>seed {run['seed']}</span></summary>{groups}</details>"
        )
    return "\n".join(out)


def _group(results: Results, kind: str, items: list[dict[str, Any]]) -> str:
    if not items:
        return ""
    title, note = KINDS[results.task][kind]
    make = _class_card if results.task == "classification" else _value_card
    cards = "".join(f"<li class='card'>{make(results, item)}</li>" for item in items[:_MOST])
    return f"<h4>{title} <span class='note'>{note}</span></h4><ul class='cards'>{cards}</ul>"


def _class_name(results: Results, index: Any) -> str:
    names = _list(results.dataset.get("classes"))
    if isinstance(index, int) and 0 <= index < len(names):
        return str(names[index])
    return "?" if index is None else f"class {index}"


def _image(item: Mapping[str, Any], alt: str) -> str:
    data = picture(item["pixels"]) if item.get("pixels") is not None else None
    if data is None:
        return ""
    return f"<img class='pixels' alt='{text(alt)}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"


def _features(item: Mapping[str, Any]) -> str:
    features = item.get("features")
    if not isinstance(features, dict) or not features:
        return ""
    shown = list(features.items())[:5]
    rows = "".join(f"<div><dt>{text(k)}</dt><dd>{_short(v)}</dd></div>" for k, v in shown)
    more = f"<p class='note'>and {len(features) - len(shown)} more</p>" if len(features) > len(shown) else ""
    return f"<dl class='features'>{rows}</dl>{more}"


def _short(value: Any) -> str:
    known = number(value)
    return f"{known:.3g}".replace("-", "−") if known is not None else text("–" if value is None else value)


def _class_card(results: Results, item: Mapping[str, Any]) -> str:
    truth, guess = _class_name(results, item.get("target")), _class_name(results, item.get("prediction"))
    right = item.get("target") == item.get("prediction")
    head = f"<b>{text(guess)}</b> ✓" if right else f"<b>{text(guess)}</b> ✗ <span>is {text(truth)}</span>"
    alt = f"Test example {item.get('index')}: {truth}, predicted {guess}"
    probabilities = [number(p) for p in _list(item.get("probabilities"))]
    ranked = sorted(((p, i) for i, p in enumerate(probabilities) if p is not None), reverse=True)
    bars = "".join(
        f"<li><span class='name'>{text(_class_name(results, i))}</span><span class='track' aria-hidden='true'>"
        f"<span class='{'fill true' if i == item.get('target') else 'fill'}' "
        f"style='width:{100 * min(1, max(0, p)):.1f}%'></span></span><span class='value'>{_percent(p)}</span></li>"
        for p, i in ranked[:_BARS]
    )
    doubt = [f"{name} {known:.2f}" for name, key in (("entropy", "entropy"), ("MI", "mutual_information"))
             if (known := number(item.get(key))) is not None]  # fmt: skip
    foot = " · ".join([f"no. {text(item.get('index'))}", *doubt])
    listed = f"<ul class='bars'>{bars}</ul>" if bars else ""
    return f"{_image(item, alt)}<p class='says'>{head}</p>{_features(item)}{listed}<p class='note'>{foot}</p>"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _percent(p: float) -> str:
    return "> 99.9 %" if p > 0.9995 else f"{p:.1%}".replace("%", " %")


def _value_card(results: Results, item: Mapping[str, Any]) -> str:
    target, guess, low, high = (number(item.get(k)) for k in ("target", "prediction", "lower", "upper"))
    inside = None not in (target, low, high) and low <= target <= high  # type: ignore[operator]
    known = [x for x in (target, guess, low, high) if x is not None]
    strip = ""
    if len(known) == 4 and max(known) > min(known):
        start, span = min(known), max(known) - min(known)
        place = {k: 100 * (v - start) / span for k, v in zip("tglh", (target, guess, low, high), strict=True)}  # type: ignore[operator]
        strip = (
            f"<span class='interval' aria-hidden='true'><span class='band' style='left:{place['l']:.1f}%;"
            f"width:{place['h'] - place['l']:.1f}%'></span><span class='mean' style='left:{place['g']:.1f}%'></span>"
            f"<span class='target' style='left:{place['t']:.1f}%'></span></span>"
        )
    alt = f"Test example {item.get('index')}"
    return (
        f"{_image(item, alt)}<p class='says'>observed <b>{_short(item.get('target'))}</b> {'✓' if inside else '✗'}</p>"
        f"{strip}<p class='note'>predicted {_short(item.get('prediction'))}, interval {_short(item.get('lower'))} to "
        f"{_short(item.get('upper'))}</p>{_features(item)}<p class='note'>no. {text(item.get('index'))}</p>"
    )

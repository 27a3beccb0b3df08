"""``summary``: what was converted, what was left alone, and what it costs in parameters."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from slimbayes.core.conversion import find_record, unwrap


@dataclass(frozen=True)
class Row:
    """One layer: its parameters before and after the conversion."""

    name: str
    layer: str
    method: str
    base_parameters: int
    parameters: int


@dataclass(frozen=True)
class Summary:
    """Parameter counts of a converted model; prints as a table."""

    parameters: int
    trainable: int
    base_parameters: int
    rows: tuple[Row, ...]
    left_alone: tuple[tuple[str, str, str], ...]

    @property
    def overhead(self) -> float:
        """Relative number of parameters that the conversion added."""
        return self.parameters / self.base_parameters - 1.0 if self.base_parameters else 0.0

    def __str__(self) -> str:
        """Render as a table."""
        head = ("layer", "type", "method", "before", "after")
        body = [
            (r.name or "(root)", r.layer, r.method, f"{r.base_parameters:,}", f"{r.parameters:,}")
            for r in self.rows
        ]
        body += [
            (name or "(root)", kind, f"left alone: {why}", "", "") for name, kind, why in self.left_alone
        ]
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(5)]
        lines = [
            "  ".join(
                cell.rjust(w) if i > 2 else cell.ljust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in [head, *body]
        ]
        lines.insert(1, "  ".join("-" * w for w in widths))
        lines.append(
            f"{self.parameters:,} parameters ({self.trainable:,} trained), {self.base_parameters:,} before: "
            f"{100 * self.overhead:+.2f} %"
        )
        return "\n".join(line.rstrip() for line in lines)


def summary(model: nn.Module) -> Summary:
    """Count the parameters of a converted model, layer by layer.

    >>> import slimbayes as sb
    >>> s = sb.summary(sb.bayesianize(nn.Linear(10, 5), sb.BatchEnsemble(components=4)))
    >>> s.base_parameters, s.parameters
    (55, 130)
    """
    record = find_record(model)
    inner = unwrap(model)
    root = next(m for m in inner.modules() if m.__dict__.get("_slimbayes") is record)
    rows = tuple(
        Row(
            name,
            _kind(module),
            type(record.methods[record.layers[name]]).__name__,
            record.layer_parameters[name],
            sum(p.numel() for p in module.parameters()),
        )
        for name, module in root.named_modules()
        if name in record.layers
    )
    total = sum(p.numel() for p in root.parameters())
    trainable = sum(p.numel() for p in root.parameters() if p.requires_grad)
    return Summary(total, trainable, record.base_parameters, rows, record.left_alone)


def _kind(module: nn.Module) -> str:
    return str(getattr(module, "title", type(module).__name__))

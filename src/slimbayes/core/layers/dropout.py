"""The network's own dropout modules, kept active in draws under MCDropout."""

from __future__ import annotations

from torch import Tensor, nn

from slimbayes.core import context
from slimbayes.core.rules.dropout import dropped


class _Active(nn.Module):
    """Dropout that follows the draw's noise mode instead of train/eval; silent at noise="mean"."""

    p: float
    source: str
    channel_axis: int | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Drop, scaled to mean one."""
        draw = context.late_draw()
        if draw is None:
            return self._drop(input)
        assert draw.late is not None
        if draw.late.untiled(self.source, input.shape[0]):
            input = context.repeat_rows(input, draw.components * draw.samples)
        output: Tensor = draw.late.result(self._drop(input))
        return output

    def _drop(self, input: Tensor) -> Tensor:
        frame = context.frame(self.source, input.shape[0])
        if frame.noise == "mean" or self.p == 0:
            return input
        return dropped(input, frame, self.source, self.p, self.channel_axis)


class ActiveDropout(_Active, nn.Dropout):
    """Element by element."""


class ActiveDropout1d(_Active, nn.Dropout1d):
    """Whole channels of [R, C, L]."""

    channel_axis = 1


class ActiveDropout2d(_Active, nn.Dropout2d):
    """Whole channels of [R, C, H, W]."""

    channel_axis = 1


class ActiveDropout3d(_Active, nn.Dropout3d):
    """Whole channels of [R, C, D, H, W]."""

    channel_axis = 1


ACTIVE: dict[type[nn.Module], type[_Active]] = {
    nn.Dropout: ActiveDropout,
    nn.Dropout1d: ActiveDropout1d,
    nn.Dropout2d: ActiveDropout2d,
    nn.Dropout3d: ActiveDropout3d,
}

"""A fast path of your own: all noise of the kind "sign" from the bits of random bytes, eight to a byte."""

import math

import torch
from torch import Tensor

import slimbayes as sb
from slimbayes.accelerate import switches
from slimbayes.core.noise import fresh_noise
from slimbayes.core.paths import FastPath, attach, detach


class PackedSigns(FastPath):
    """It answers the one question that it overrides; None hands the question on, in the end to core's own way."""

    def on(self) -> bool:
        """By which switch of sb.fast_paths it is turned off."""
        return switches.paths.noise

    def noise(
        self, kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Standard noise: ±1, each of a bit."""
        if kind != "sign" or device.type != "cpu" or torch.compiler.is_compiling():
            return None
        count = math.prod(size)
        packed = torch.randint(256, ((count + 7) // 8, 1), dtype=torch.uint8)
        bits = packed.bitwise_right_shift(torch.arange(8, dtype=torch.uint8)).bitwise_and(1)
        return bits.flatten()[:count].view(size).to(dtype).mul_(2).sub_(1)


def main() -> dict[str, float]:
    def signs() -> Tensor:
        torch.manual_seed(0)
        return fresh_noise("sign", (400, 500), torch.float32, torch.device("cpu"))

    path = PackedSigns()
    attach(path)  # of slimbayes' own paths each is a line in accelerate/registry.py
    try:
        fast = signs()
        with sb.fast_paths(False):
            plain = signs()
    finally:
        detach(path)
    mean, square = fast.mean().item(), fast.square().mean().item()
    print(
        f"mean {mean:.4f}, mean square {square:.1f}; core's own: {plain.mean():.4f}, {plain.square().mean():.1f}"
    )
    return {"mean": mean, "square": square, "other": (fast != plain).float().mean().item()}


if __name__ == "__main__":
    main()

"""What it would take to settle a claim at the size of its paper."""

from __future__ import annotations

from dataclasses import dataclass

GPU, GPU_FLOPS, UTILIZATION = "A100", 312e12, 0.4  # dense bf16 peak of the data sheet; an assumption
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv 2203.15556: the papers' budgets are not public
SEQ_LEN = 512


@dataclass(frozen=True)
class StudyCost:
    """A comparison of models of a published size, each trained on 20 tokens per parameter."""

    preset: str
    arms: int
    seeds: int

    def __str__(self) -> str:
        from qkflow.models import Decoder
        from qkflow.models.cost import flops_per_token
        from qkflow.models.presets import preset

        config = preset(self.preset)
        n_parameters = sum(p.numel() for p in Decoder(config, device="meta").parameters())
        tokens = TOKENS_PER_PARAMETER * n_parameters
        flops = flops_per_token(config, SEQ_LEN) * tokens * self.arms * self.seeds
        hours = flops / (GPU_FLOPS * UTILIZATION) / 3600
        return (
            f"{self.arms} arms × {self.seeds} seeds of `{self.preset}`, {tokens / 1e9:.1f}B tokens each: "
            f"{flops:.1e} FLOPs, about {hours:,.0f} hours of one {GPU} at {UTILIZATION:.0%} of its peak"
        )

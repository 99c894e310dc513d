"""One optimizer step: forward and backward over the parts of a batch, clipping, update."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from qkflow.errors import unknown
from qkflow.models import Decoder
from qkflow.models.loss import Reduction, linear_cross_entropy
from qkflow.roles import freeze_roles
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import DistContext
from qkflow.training.optimizer import AdamW, clip_grad_norm, pace_lr_multipliers, parameter_groups

if TYPE_CHECKING:
    from qkflow.data import TrainWindows


class NonFiniteError(Exception):
    """The loss or its gradient is no longer a number; the message says what was happening."""


class Objective(nn.Module):
    """A decoder and its loss as one module: what is wrapped for many processes is the whole of a step."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, inputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        hidden = self.decoder(inputs)
        return linear_cross_entropy(hidden, self.decoder.output_weight, targets, reduction=reduction)


class Stepper:
    """Makes the steps of one run. Only the weights and the optimizer's state change from step to step."""

    def __init__(
        self, decoder: Decoder, config: TrainConfig, windows: TrainWindows, dist_context: DistContext
    ) -> None:
        self.decoder, self.config, self.windows, self.dist_context = decoder, config, windows, dist_context
        decoder.activation_checkpointing = config.activation_checkpointing
        if config.compile:
            decoder.compile(
                **({} if config.compile is True else {"backend": _check_compile_backend(config.compile)})
            )
        freeze_roles(decoder, config.freeze)
        objective = Objective(decoder)
        dist_context.shard(objective, iter(decoder.blocks))
        multipliers = pace_lr_multipliers(config.pace, decoder)
        groups = parameter_groups(decoder, config.lr, config.weight_decay, multipliers)
        self.optimizer = AdamW(groups, config.beta1, config.beta2, config.eps)
        self.objective = dist_context.wrap(objective)
        # Where looking at a value costs nothing, a bad step is found before it has touched the weights.
        self.check_before_update = dist_context.device.type == "cpu"

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that steps change, by name, the very tensors."""
        weights = {f"model.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        return {**weights, **self.optimizer.state_dict()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.dist_context.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        )

    def step(self, step: int, lr: float, progress: float) -> tuple[Tensor, Tensor]:
        """Make step `number` (from 0); its loss and the norm of its gradient."""
        seed_everything(self.config.seed, step, self.dist_context)
        for group in self.optimizer.param_groups:
            group.set_lr(lr, progress)
        self.optimizer.zero_grad()
        parts = self.config.accumulate
        ids = torch.from_numpy(self.windows.batch(step)).to(self.dist_context.device, non_blocking=True)
        losses = []
        for part, some in enumerate(ids.chunk(parts)):
            with self.dist_context.gradient_sync(self.objective, is_last_microbatch=part == parts - 1):
                with self.autocast():
                    loss = self.objective(some[:, :-1], some[:, 1:])
                (loss / parts if parts > 1 else loss).backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).mean() if parts > 1 else losses[0]
        if self.dist_context.world_size > 1:
            loss = self.dist_context.all_reduce_sum(loss.clone()) / self.dist_context.world_size
        norm = clip_grad_norm(self.optimizer.gradients(), self.config.clip)
        if self.check_before_update:
            self.check_finite(step, lr, float(loss), float(norm))
        self.optimizer.step()
        return loss, norm

    def check_finite(self, step: int, lr: float, loss: float, grad_norm: float) -> None:
        """Stop at a loss or gradient that is not finite, saying everything that helps to find out why."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        what = "loss" if not math.isfinite(loss) else "gradient"
        starts = self.windows.starts(step)[:4].tolist()
        bad = [
            name
            for group in self.optimizer.param_groups
            for name, p in group.parameters.items()
            if p.grad is not None and not torch.isfinite(p.grad).all()
        ]
        blame = f"; first among the gradients: {', '.join(bad[:3])}" if bad and len(bad) < 10 else ""
        raise NonFiniteError(
            f"the {what} is not finite at step {step + 1} (loss {loss:.4g}, gradient norm {grad_norm:.4g}, "
            f"learning rate {lr:.3g}, batch {step} of seed {self.config.seed} with windows at tokens "
            f"{starts}…){blame}: a lower learning rate or a longer warm-up usually helps"
        )

    def eval_loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The summed loss of a batch, each process taking its share of the rows."""
        rank, world = self.dist_context.rank, self.dist_context.world_size

        def loss_sum(inputs: Tensor, targets: Tensor) -> Tensor:
            missing = (
                -len(inputs) % world
            )  # every process must take part, if only with rows that do not count
            if missing:
                inputs = torch.cat([inputs, inputs[:1].expand(missing, -1)])
                targets = torch.cat([targets, torch.full_like(targets[:1], -100).expand(missing, -1)])
            total: Tensor = self.objective(inputs[rank::world], targets[rank::world], "sum")
            return self.dist_context.all_reduce_sum(total)

        return loss_sum


def _check_compile_backend(name: str) -> str:
    if name not in torch.compiler.list_backends(exclude_tags=()):
        raise unknown("backend of train.compile", name, torch.compiler.list_backends())
    return name


def seed_everything(seed: int, step: int, dist_context: DistContext) -> None:
    """Make every random number of a step a function of the run's seed, the step and the process.

    So a run that goes on after a kill needs no saved generators, and what is random elsewhere (a probe, an
    evaluation) cannot change what is learned.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{dist_context.rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(number)  # torch.manual_seed takes ten times as long
    if dist_context.device.type != "cpu":
        torch.get_device_module(dist_context.device).manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)

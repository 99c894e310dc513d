"""One optimizer step: forward and backward over microbatches, gradient clipping, update."""

from __future__ import annotations

import gc
import hashlib
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from qkflow.errors import join_limited, unknown
from qkflow.models import Decoder
from qkflow.models.loss import Reduction
from qkflow.roles import freeze_roles
from qkflow.training.config import TrainConfig
from qkflow.training.distributed import DistContext
from qkflow.training.fold import fold_drifts, layers_to_fold
from qkflow.training.muon import Muon, hidden_matrices
from qkflow.training.optimizer import AdamW, Optimizer, ParamGroup, clip_grad_norm, parameter_groups
from qkflow.training.pace import pace_lr_multipliers

if TYPE_CHECKING:
    from qkflow.data import TrainWindows


class NonFiniteError(Exception):
    """The loss or its gradient is NaN or infinite. The message names the step, batch and parameters."""


class Objective(nn.Module):
    """A decoder with its loss as one module, the unit that DDP and FSDP wrap."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, inputs: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
        hidden = self.decoder(inputs)
        return self.decoder.loss(hidden, targets, reduction=reduction)


class Stepper:
    """Runs optimizer steps. Only the weights and the optimizer state change from step to step.

    `total_steps` is the length of the run, None if its budget is a time.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: TrainConfig,
        windows: TrainWindows,
        dist_context: DistContext,
        total_steps: int | None = None,
    ) -> None:
        self.decoder, self.config, self.windows, self.dist_context = decoder, config, windows, dist_context
        decoder.activation_checkpointing = config.activation_checkpointing
        blocks = [*decoder.blocks, *(decoder.slow.blocks if decoder.slow is not None else ())]
        if config.compile:
            backend = "inductor" if config.compile is True else _check_compile_backend(config.compile)
            for block in blocks:  # before sharding; blocks of equal structure share one graph
                block.compile(fullgraph=True, backend=backend)
        freeze_roles(decoder, config.freeze)
        self._pending_folds = layers_to_fold(decoder, is_sharded=dist_context.is_sharded)
        objective = Objective(decoder)
        dist_context.shard(objective, blocks, config)
        multipliers = pace_lr_multipliers(config.pace, decoder, total_steps)
        groups = parameter_groups(decoder, config.lr, config.weight_decay, multipliers)
        self.optimizer = _build_optimizer(config, decoder, groups)
        self._unwrapped = objective
        self.objective = dist_context.wrap(objective)
        # On a CPU, reading the loss needs no synchronization: a bad step is detected before the update.
        self.check_before_update = dist_context.device.type == "cpu"

    def state_dict(self) -> dict[str, Tensor]:
        """Return weights and optimizer state by name, the tensors themselves."""
        weights = {f"model.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        return {**weights, **self.optimizer.state_dict()}

    def autocast(self) -> torch.autocast:
        return torch.autocast(
            self.dist_context.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"
        )

    def step(self, step: int, lr: float, progress: float) -> tuple[Tensor, Tensor]:
        """Run step `step` (from 0). Return its loss and gradient norm, averaged over all processes."""
        seed_everything(self.config.seed, step, self.dist_context)
        self.optimizer.set_lr(lr, progress)
        self.optimizer.zero_grad()
        if self._pending_folds and fold_drifts(self._pending_folds, progress):
            self._wrap_again()
        n_microbatches = self.config.accumulate
        ids = torch.from_numpy(self.windows.batch(step)).to(self.dist_context.device, non_blocking=True)
        losses = []
        for index, part in enumerate(ids.chunk(n_microbatches)):
            is_last = index == n_microbatches - 1
            with self.dist_context.gradient_sync(self.objective, is_last_microbatch=is_last):
                with self.autocast():
                    loss = self.objective(part[:, :-1], part[:, 1:])
                (loss / n_microbatches if n_microbatches > 1 else loss).backward()
            losses.append(loss.detach())
        loss = torch.stack(losses).mean() if n_microbatches > 1 else losses[0]
        if self.dist_context.world_size > 1:
            loss = self.dist_context.all_reduce_sum(loss.clone()) / self.dist_context.world_size
        norm = clip_grad_norm(self.optimizer.gradients(), self.config.clip)
        if self.check_before_update:
            self.check_finite(step, lr, float(loss), float(norm))
        self.optimizer.step()
        return loss, norm

    def _wrap_again(self) -> None:
        """Wrap the model again after a parameter was frozen: DDP waits for every gradient it expects."""
        self.objective = self._unwrapped
        gc.collect()  # hooks of the old wrapper end with it
        self.objective = self.dist_context.wrap(self._unwrapped)

    def check_finite(self, step: int, lr: float, loss: float, grad_norm: float) -> None:
        """Raise NonFiniteError if the loss or the gradient norm is NaN or infinite."""
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        quantity = "loss" if not math.isfinite(loss) else "gradient"
        offsets = self.windows.starts(step)[:4].tolist()
        bad = [
            name
            for group in self.optimizer.param_groups
            for name, p in group.parameters.items()
            if p.grad is not None and not torch.isfinite(p.grad).all()
        ]
        names = f"; non-finite gradients: {join_limited(bad)}" if bad and len(bad) < 10 else ""
        raise NonFiniteError(
            f"the {quantity} is not finite at step {step + 1} (loss {loss:.4g}, gradient norm "
            f"{grad_norm:.4g}, learning rate {lr:.3g}, batch {step} of seed {self.config.seed}, windows at "
            f"tokens {offsets}…){names}: try a lower learning rate or a longer warmup"
        )

    def eval_loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return a function for the summed loss of a batch, whose rows are distributed over the processes."""
        rank, world = self.dist_context.rank, self.dist_context.world_size

        def loss_sum(inputs: Tensor, targets: Tensor) -> Tensor:
            missing = -len(inputs) % world
            if missing:  # every process needs a row for the collectives of FSDP: pad with ignored rows
                inputs = torch.cat([inputs, inputs[:1].expand(missing, -1)])
                targets = torch.cat([targets, torch.full_like(targets[:1], -100).expand(missing, -1)])
            total: Tensor = self.objective(inputs[rank::world], targets[rank::world], "sum")
            return self.dist_context.all_reduce_sum(total)

        return loss_sum


def _build_optimizer(config: TrainConfig, decoder: Decoder, groups: list[ParamGroup]) -> Optimizer:
    adamw = (config.beta1, config.beta2, config.eps)
    if config.optimizer == "muon":
        return Muon(groups, hidden_matrices(decoder), config.momentum, *adamw)
    return AdamW(groups, *adamw)


def _check_compile_backend(name: str) -> str:
    if name not in torch.compiler.list_backends(exclude_tags=()):
        raise unknown(
            "backend of train.compile",
            name,
            torch.compiler.list_backends(),
            code="unknown-compile-backend",
        )
    return name


def seed_everything(seed: int, step: int, dist_context: DistContext) -> None:
    """Seed all generators with a function of the run's seed, the step and the process.

    A resumed run therefore needs no generator state, and random numbers drawn elsewhere (probes, evaluation)
    do not change training.
    """
    digest = hashlib.blake2b(f"{seed}/{step}/{dist_context.rank}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "big") >> 1
    torch.default_generator.manual_seed(number)  # 10 times as fast as torch.manual_seed
    if dist_context.device.type != "cpu":
        torch.get_device_module(dist_context.device).manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)

"""Muon (Jordan et al. 2024): momentum whose update of every hidden matrix is orthogonalized.

    m ← μ·m + (1 − μ)·g
    u = (1 − μ)·g + μ·m                           (Nesterov)
    w ← (1 − η·λ)·w − 0.2·η·√max(A, B)·orth(u)    for w (A, B)

orth(u) ≈ U·Vᵀ of the singular value decomposition u = U·S·Vᵀ, by five Newton-Schulz steps. The entries of an
orthogonal matrix have the RMS 1/√max(A, B), so the factor gives an update the RMS of AdamW's, about 0.2
(Moonlight, arXiv 2502.16982). One learning rate and one weight decay therefore serve both optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from qkflow.roles import parameter_roles
from qkflow.system import has_bfloat16_instructions
from qkflow.training.optimizer import AdamW, Optimizer, ParamGroup

HIDDEN_ROLES = ("q", "k", "qk", "v", "o", "ov", "mlp", "slow")
COLLAPSED_ROLES = ("qk", "ov")  # (H, dim, dim): one matrix per head
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # the coefficients of torch.optim.Muon
NEWTON_SCHULZ_STEPS = 5
EPS = 1e-7
MAX_BATCH_ELEMENTS = 1 << 24  # of matrices that are orthogonalized together, to limit memory


def hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Muon updates: the matrices of projections and feed-forwards.

    A parameter inside the slow path counts by the role that its own module declares, so that couplings and
    scorings of slow blocks are left to AdamW.
    """
    roles = parameter_roles(model, use_claims=False)
    return {
        name
        for name, parameter in model.named_parameters()
        if roles[name] in HIDDEN_ROLES and parameter.dim() == (3 if roles[name] in COLLAPSED_ROLES else 2)
    }


class Muon(Optimizer):
    """Muon for the parameters named in `hidden`, AdamW for all others.

    Equal to `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` up to the rounding of its Newton-Schulz steps:
    matrices of equal shape are orthogonalized as one batch. Of a sharded matrix (FSDP), every process
    orthogonalizes the whole and updates its shard.
    """

    def __init__(
        self,
        param_groups: list[ParamGroup],
        hidden: Collection[str],
        momentum: float = 0.95,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
    ) -> None:
        self.muon_groups = _select(param_groups, lambda name: name in hidden)
        self.adamw = AdamW(_select(param_groups, lambda name: name not in hidden), beta1, beta2, eps)
        super().__init__([*self.muon_groups, *self.adamw.param_groups])
        self.momentum = momentum
        self.momentum_buffer = {
            name: torch.zeros_like(p) for group in self.muon_groups for name, p in group.parameters.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        trained = [
            (group, name, parameter, parameter.grad)
            for group in self.muon_groups
            for name, parameter in group.parameters.items()
            if parameter.grad is not None
        ]
        updates = []
        for _, name, _, grad in trained:
            buffer = self.momentum_buffer[name].lerp_(grad, 1 - self.momentum)
            updates.append(_unsharded(grad.lerp(buffer, self.momentum)))
        for index, update in orthogonalize(updates):
            group, _, parameter, _ = trained[index]
            scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
            parameter.mul_(1 - group.lr * group.weight_decay)
            parameter.add_(_sharded_like(update, parameter), alpha=-group.lr * scale)

    def state_dict(self) -> dict[str, Tensor]:
        momentum = {f"optimizer.momentum.{name}": tensor for name, tensor in self.momentum_buffer.items()}
        return {**self.adamw.state_dict(), **momentum}


def orthogonalize(updates: list[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and orth(u) of every update (…, A, B).

    Those of equal shape up to transposition are computed together.
    """
    batches: dict[tuple[int, ...], list[int]] = {}
    for index, update in enumerate(updates):
        batches.setdefault(tuple(sorted(update.shape[-2:])), []).append(index)
    for shape, indices in batches.items():
        for part in _split(indices, [updates[i].numel() for i in indices]):
            batch = [_wide(updates[i].to(newton_schulz_dtype(updates[i].device))) for i in part]
            flat = [u.reshape(-1, *shape) for u in batch]
            done = newton_schulz(torch.cat(flat)).split([len(u) for u in flat])
            for index, result in zip(part, done, strict=True):
                is_tall = updates[index].shape[-2] > updates[index].shape[-1]
                yield index, (result.mT if is_tall else result).reshape(updates[index].shape)


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return orth of every matrix (N, A, B) with A ≤ B, by X ← a·X + (b·G + c·G²)·X with G = X·Xᵀ.

    The coefficients converge fast instead of exactly: singular values end between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, as torch.optim.Muon uses, or float32 on a CPU without bfloat16 instructions.

    There, emulated bfloat16 is three to four times slower than float32.
    """
    return torch.bfloat16 if has_bfloat16_instructions(device) else torch.float32


def _wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix


def _select(param_groups: list[ParamGroup], condition: Callable[[str], bool]) -> list[ParamGroup]:
    """Return the groups with only the parameters whose name meets the condition, without empty groups."""
    selected = [
        replace(group, parameters={name: p for name, p in group.parameters.items() if condition(name)})
        for group in param_groups
    ]
    return [group for group in selected if group.parameters]


def _split(indices: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Yield runs of indices with at most MAX_BATCH_ELEMENTS elements together, or one index."""
    part: list[int] = []
    total = 0
    for index, size in zip(indices, sizes, strict=True):
        if part and total + size > MAX_BATCH_ELEMENTS:
            yield part
            part, total = [], 0
        part.append(index)
        total += size
    yield part


def _unsharded(tensor: Tensor) -> Tensor:
    """Return the whole tensor of a shard (FSDP), or the tensor itself."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _sharded_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this process's shard of a tensor that all processes have, if `like` is sharded (FSDP)."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    assert isinstance(like, DTensor)
    everywhere = [Replicate()] * like.device_mesh.ndim
    return DTensor.from_local(tensor, like.device_mesh, everywhere).redistribute(placements=like.placements)

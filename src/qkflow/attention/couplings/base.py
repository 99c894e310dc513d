"""The contract of a coupling, and the registry of all of them.

Shapes: q is (B, T, H, D), k is (B, T, G, D); query head h belongs to key head h // (H/G).
Grouped heads: every query of a group takes the group's key, the key takes the group's mean force.
"""

from __future__ import annotations

import math
import operator
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from qkflow.attention.couplings.at_rest import AtRest
from qkflow.attention.heads import HeadShapes
from qkflow.attention.init import ParamSampler, copy_into
from qkflow.attention.projections import FactorizedQK, is_autocast_enabled
from qkflow.attention.registry import Registry, Spec
from qkflow.autograd import is_transformed
from qkflow.errors import InputError

LARGEST_AT_REST = 2**22  # weights; above, a second copy of them costs more than small operations do
FactoryKwargs = dict[str, Any]  # device and dtype, as every torch factory takes them
KEPT = ("_kept", "_kept_idle")  # beside a module's state
Made = TypeVar("Made")


class Coupling(nn.Module):
    """A map of each token's own (q, k). Subclasses declare what they promise; the contract tests check it."""

    name: ClassVar[str]
    equation: ClassVar[str]
    citation: ClassVar[str]
    good_for: ClassVar[str]
    identity_at_init: ClassVar[bool] = False
    invertible: ClassVar[bool] = False
    aliases: ClassVar[dict[str, str]] = {
        "n": "steps",
        "delta": "step",
        "r": "hidden_dim",
        "hidden": "hidden_dim",
    }

    def __init__(self, heads: HeadShapes) -> None:
        super().__init__()
        self.head_shapes = heads

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The fast form."""
        raise NotImplementedError

    def reference(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The textbook form, which defines what is correct."""
        raise NotImplementedError

    def inverse(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The (q, k) that forward maps to these."""
        raise InputError(f"coupling '{self.name}' has no inverse")

    def from_input(self, x: Tensor, qk: FactorizedQK, in_midst: bool = False) -> tuple[Tensor, Tensor]:
        """Project tokens x (B, T, width) and couple them, in inference with what was prepared for it."""
        at_rest = self.resting(x, qk, in_midst=in_midst)
        if at_rest is None:
            return self.together(x, qk)
        q, k, _ = at_rest(x)
        return q.unflatten(-1, (-1, self.head_shapes.head_dim)), k.unflatten(
            -1, (-1, self.head_shapes.head_dim)
        )

    def resting(
        self, x: Tensor, qk: FactorizedQK, v: nn.Linear | None = None, in_midst: bool = False
    ) -> AtRest | None:
        """What is prepared for tokens like x, if they come in inference and anything can be prepared.

        v         what projects the values, if those are wanted too
        in_midst  whether x goes on with a text whose beginning has been read
        """
        if x.is_meta or not self._may_rest() or is_autocast_enabled(x):
            return None
        kept: _Kept[AtRest] | None = self.__dict__.get("_kept")
        if kept is None or not kept.holds((self, qk, v), in_midst):
            kept = self._prepare(qk, v)
        return None if kept is None else kept.made

    def together(self, x: Tensor, qk: FactorizedQK) -> tuple[Tensor, Tensor]:
        """Project and couple while parameters may change; overridden where the two together are cheaper."""
        self.check_not_offloaded(x, "Block")
        out: tuple[Tensor, Tensor] = self(*qk(x, x))
        return out

    def multiplies(self, qk: FactorizedQK) -> bool:
        """Whether products of its weights and these can stand for projecting and coupling."""
        weight = qk.q.weight
        return qk.is_plain and next(self.parameters(), weight).dtype == weight.dtype

    def check_not_offloaded(self, x: Tensor, module_class: str) -> None:
        check_not_offloaded(next(self.parameters(), x), x, module_class)

    def at_rest(self, qk: FactorizedQK) -> AtRest | None:
        """Projection and coupling prepared for inference, from the parameters as they are; None: as ever."""
        return None

    def _prepare(self, qk: FactorizedQK, v: nn.Linear | None) -> _Kept[AtRest] | None:
        self._forget()
        if qk.q.weight.numel() > LARGEST_AT_REST or not self.multiplies(qk):
            return None
        made = self.at_rest(qk)
        if made is None:
            return None
        if v is not None:
            made = made.with_values(v)
        kept = self.__dict__["_kept"] = _Kept(made, (self, qk, v))
        return kept

    def idle(self) -> bool:
        """Whether the parameters, as they are, leave every q and k exactly as they come."""
        return False

    def passes_by(self, in_midst: bool) -> bool:
        """Whether tokens may go on as if this coupling were not there: it is idle, and at rest."""
        if not self.identity_at_init or not self._may_rest() or "_kept" in self.__dict__:
            return False  # what was prepared was prepared for a coupling that is not idle
        kept: _Kept[bool] | None = self.__dict__.get("_kept_idle")
        if kept is None or not kept.holds((self,), in_midst):
            if any(parameter.is_meta for parameter in self.parameters()):
                return False  # not here to be looked at
            kept = self.__dict__["_kept_idle"] = _Kept(self.idle(), (self,))
        return kept.made

    def _may_rest(self) -> bool:
        """Whether products of weights may be kept: in inference, where nothing is being trained.

        PyTorch's fused optimizers change parameters without a trace, so whatever may belong to training
        (a pass with gradients, a change between train and eval mode) forgets what was kept.
        """
        if torch.compiler.is_compiling() or is_transformed():
            return False
        if torch.is_grad_enabled() or self.training:
            self._forget()
            return False
        return True

    def _forget(self) -> None:
        for name in KEPT:
            self.__dict__.pop(name, None)

    def train(self, mode: bool = True) -> Self:
        if mode != self.training:
            self._forget()
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # what was kept belongs to these very parameters: copies and pickles go without
        return {name: value for name, value in self.__dict__.items() if name not in KEPT}

    @property
    def symplectic(self) -> bool:
        """Whether the Jacobian J of (q, k) satisfies JᵀΩJ = Ω for every value of the parameters."""
        return False

    def extra_parameters(self) -> int:
        """The number of parameters this coupling adds to its layer, by formula."""
        return 0

    def extra_flops(self) -> int:
        """Floating-point operations of matrix products per token in one forward pass, by formula."""
        return 0

    def take_linear_drift(self) -> Tensor | None:
        """Hand over the linear drift q += amount_h·k and leave it out from now on.

        The caller puts the amounts (H,), if there are any, into the projections.
        """
        return None


class _Kept(Generic[Made]):
    """What was made of the parameters of some modules, and whether they are still the same."""

    def __init__(self, made: Made, sources: tuple[nn.Module | None, ...]) -> None:
        self.made, self.sources = made, sources
        modules = [module for source in sources if source is not None for module in source.modules()]
        self.parts: list[tuple[dict[str, Any], str, object]] = [
            (owner, name, part)
            for module in modules
            for owner in (module._modules, module._parameters, module._buffers)
            for name, part in owner.items()
        ]
        tensors = [(owner, name, part) for owner, name, part in self.parts if isinstance(part, Tensor)]
        self.counted = [(*place, place[2]._version) for place in tensors if not place[2].is_inference()]
        self.tensors = [tensor for _, _, tensor in tensors]
        self.weighed = [_weighed(tensor) for tensor in self.tensors]
        self.places, self.print = self._places(), self._fingerprint()

    def holds(self, sources: tuple[nn.Module | None, ...], in_midst: bool) -> bool:
        """Whether nothing was exchanged or changed since.

        Fused optimizers and writing through `.data` leave no trace but in the values. So those are looked at
        too, but in the midst of a text, where every token asks, only what PyTorch has recorded.
        """
        if not all(map(operator.is_, self.sources, sources)):
            return False
        for owner, name, tensor, version in self.counted:
            if owner.get(name) is not tensor or tensor._version != version:
                return False
        return in_midst or (
            all(owner.get(name) is part for owner, name, part in self.parts)
            and self._places() == self.places
            and torch.equal(self._fingerprint(), self.print)
        )

    def _places(self) -> list[int]:
        """Where in memory the tensors lie."""
        return [tensor.data_ptr() for tensor in self.tensors]

    def _fingerprint(self) -> Tensor:
        """A weighted sum of every row of every tensor, in which each place counts differently."""
        rows = [(m.float() if m.dtype.itemsize < 4 else m) @ places for m, places in self.weighed]
        return torch.cat(rows) if rows else torch.empty(0)


def _weighed(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor as rows, and what each place of a row counts."""
    matrix = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
    exact = torch.promote_types(torch.float32, matrix.dtype)
    return matrix, torch.linspace(1, 2, matrix.shape[1], dtype=exact, device=matrix.device)


def check_not_offloaded(weight: Tensor, x: Tensor, module_class: str) -> None:
    """Weights that accelerate has put away come back by themselves only for modules that are called."""
    if weight.is_meta and not x.is_meta:
        raise InputError(
            f"weights that {module_class} uses are offloaded, and accelerate did not bring them back for this call"
            f": give it preload_module_classes=['{module_class}']"
        )


class StepSize(nn.Module):
    """Δ: one per query head, or one for the layer; learned or fixed."""

    def __init__(
        self, n_heads: int, init_value: float, learned: bool, per: str, factory_kwargs: FactoryKwargs
    ) -> None:
        super().__init__()
        if not math.isfinite(init_value):
            raise InputError(f"the step size must be a finite number, not {init_value}")
        if per not in ("head", "layer"):
            raise InputError(f"a step size is per 'head' or per 'layer', not '{per}'")
        self.n_heads = n_heads
        self.init_value = init_value
        value = torch.full((n_heads if per == "head" else 1,), float(init_value), **factory_kwargs)
        if learned:
            self.value = nn.Parameter(value)
        else:
            self.register_buffer("value", value)

    def per_head(self) -> Tensor:
        """Δ of every query head (H,)."""
        return self.value.expand(self.n_heads)

    def n_params(self) -> int:
        return self.value.numel() if isinstance(self.value, nn.Parameter) else 0

    def init_parameters(self, sampler: ParamSampler) -> None:
        nn.init.constant_(self.value, self.init_value)


class HeadNetworks(nn.Module):
    """f(x) = W2·silu(W1·x + b1) + b2, one network a head or one shared by all heads.

    W1 is (H, r, D) and W2 (H, out, r): sizes per head, so that all heads run as one batched product.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        hidden_dim: int,
        factory_kwargs: FactoryKwargs,
        *,
        out_dim: int | None = None,
        shared: bool = False,
        bias: bool = False,
        zero_output: bool = False,
    ) -> None:
        super().__init__()
        if hidden_dim < 1:
            raise InputError(f"the hidden size of a coupling network must be at least 1, not {hidden_dim}")
        count, out_dim = 1 if shared else n_heads, out_dim or head_dim
        self.n_heads, self.hidden_dim, self.out_dim, self.zero_output = (
            n_heads,
            hidden_dim,
            out_dim,
            zero_output,
        )
        self.w1 = nn.Parameter(torch.empty(count, hidden_dim, head_dim, **factory_kwargs))
        self.w2 = nn.Parameter(torch.empty(count, out_dim, hidden_dim, **factory_kwargs))
        self.b1 = nn.Parameter(torch.empty(count, hidden_dim, **factory_kwargs)) if bias else None
        self.b2 = nn.Parameter(torch.empty(count, out_dim, **factory_kwargs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """The textbook form on (B, T, H, D)."""
        u = torch.einsum("bthd,hrd->bthr", x, self.per_head(self.w1))
        if self.b1 is not None:
            u = u + self.b1
        y = torch.einsum("bthr,hor->btho", torch.nn.functional.silu(u), self.per_head(self.w2))
        return y if self.b2 is None else y + self.b2

    def per_head(self, parameter: Tensor) -> Tensor:
        return (
            parameter
            if len(parameter) == self.n_heads
            else parameter.expand(self.n_heads, *parameter.shape[1:])
        )

    def n_params(self) -> int:
        count, hidden, size = self.w1.shape
        biases = hidden + self.out_dim if self.b1 is not None else 0
        return count * (hidden * (size + self.out_dim) + biases)

    def init_parameters(self, sampler: ParamSampler) -> None:
        copy_into(self.w1, sampler.matrix("w1", self.w1.shape, self.w1.shape[-1]))
        if self.zero_output:
            nn.init.zeros_(self.w2)
        else:
            copy_into(self.w2, sampler.matrix("w2", self.w2.shape, self.hidden_dim))
        for bias in (self.b1, self.b2):
            if bias is not None:
                nn.init.zeros_(bias)


def repeat_keys(k: Tensor, group: int) -> Tensor:
    """Give every query head its group's key: (B, T, G, D) -> (B, T, H, D)."""
    return k if group == 1 else k.repeat_interleave(group, dim=2)


def group_mean(force: Tensor, group: int) -> Tensor:
    """Mean over the query heads of each group: (B, T, H, D) -> (B, T, G, D)."""
    return force if group == 1 else force.unflatten(2, (-1, group)).mean(dim=3)


def add_drift(q: Tensor, k: Tensor, drift: Tensor) -> Tensor:
    """q + amount_h·k, one amount a query head."""
    group, drift = q.shape[2] // k.shape[2], drift.to(q.dtype)
    if group == 1:
        return torch.addcmul(q, k, drift[:, None])
    grouped = q.unflatten(2, (-1, group))
    return torch.addcmul(grouped, k.unsqueeze(3), drift.view(-1, group, 1)).flatten(2, 3)


def check_steps(steps: int) -> int:
    if not isinstance(steps, int) or steps < 1:
        raise InputError(f"a coupling takes a whole number of steps, at least 1, not {steps}")
    return steps


_REGISTRY: Registry[Coupling] = Registry("coupling", "qkflow.attention.couplings", "qkflow.couplings")
register = _REGISTRY.register
names = _REGISTRY.names
get = _REGISTRY.get
check = _REGISTRY.check
options = _REGISTRY.options


def build(spec: str | Spec, heads: HeadShapes, factory_kwargs: FactoryKwargs | None = None) -> Coupling:
    return _REGISTRY.build(spec, heads, factory_kwargs or {})

"""A coupled layer: somebody else's attention, whose projections hand out coupled queries and keys.

Every attention layer of the field begins alike: project the tokens to queries and keys, cut them into
heads, then normalise and rotate. A coupling belongs between the first two, so nothing of the layer's code
has to be known but the names of its projections. A coupled layer has

- a child `coupling`, whose weights are all that is added: names, weights and hooks of the model stay; and
- a class of its own, a subclass of the one it had, whose forward runs the layer's own forward, unchanged,
  on a *view* of the layer: the same layer in everything but that its projections are coupled.

The view lives for one call. So nothing is kept between calls that caches, recomputation in the backward
pass, threads or `torch.compile` could trip over, and whatever stands in the place of a projection (LoRA, a
quantised layer, an offloaded one) is called as the layer would call it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention.couplings import Coupling
from qkflow.attention.heads import HeadShapes
from qkflow.attention.projections import FactorizedQK, is_autocast_enabled, is_plain_linear
from qkflow.errors import InputError
from qkflow.hf.attention_layers import AttentionLayer, QKVLayout


@dataclass(frozen=True)
class CouplingInfo:
    """What a coupled layer has to know: its coupling, and where its queries and keys come from."""

    spec: str
    q_name: str
    k_name: str
    v_name: str | None
    heads: HeadShapes
    layout: QKVLayout | None
    qk_circuit: FactorizedQK | None  # the very projections, for couplings that can make use of their weights


class CoupledAttention(nn.Module):
    """The part of a coupled layer that is ours; `coupled_class` puts it in front of the model's own class."""

    roles: ClassVar[dict[str, str]] = {"coupling": "coupling"}
    original_class: ClassVar[type[nn.Module]]
    coupling: nn.Module
    coupling_info: CouplingInfo

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        coupling = self._modules["coupling"]
        in_midst = not self.training and self._has_past(*args, *kwargs.values())
        if isinstance(coupling, Coupling) and coupling.passes_by(in_midst):
            return self.original_class.forward(self, *args, **kwargs)
        view = (SeparateQKVProxy if self.coupling_info.layout is None else FusedQKVProxy)(self, in_midst)
        out = self.original_class.forward(view, *args, **kwargs)
        view.check_projections_called()
        return out

    def _has_past(self, *inputs: Any) -> bool:
        """Whether a cache among what the layer was given already holds the beginning of the text."""
        if torch.compiler.is_compiling():
            return False
        for value in inputs:
            if not isinstance(value, Tensor) and hasattr(value, "get_seq_length"):
                return bool(value.get_seq_length(getattr(self, "layer_idx", None) or 0))
        return False

    def __reduce__(self) -> Any:
        # a class made at run time cannot be found by its name, so copies and pickles make it anew
        return _new_coupled_layer, (self.original_class,), self.__dict__


_coupled_classes: dict[type[nn.Module], type[CoupledAttention]] = {}


def coupled_class(original_class: type[nn.Module]) -> type[CoupledAttention]:
    if original_class not in _coupled_classes:
        name = f"Coupled{original_class.__name__}"
        _coupled_classes[original_class] = type(
            name, (CoupledAttention, original_class), {"original_class": original_class}
        )
    return _coupled_classes[original_class]


def _new_coupled_layer(original_class: type[nn.Module]) -> nn.Module:
    cls = coupled_class(original_class)
    return cls.__new__(cls)


class LayerProxy:
    """A layer as its own forward sees it for one call."""

    def __init__(self, layer: CoupledAttention, has_past: bool) -> None:
        if not torch.compiler.is_compiling():
            # at hand, so that they need not be looked up one by one, which generation would feel
            vars(self).update(vars(layer))
            vars(self).update(layer._modules)
        self.coupled_layer, self.coupled_has_past = layer, has_past
        self.coupled_input: Tensor | None = None  # of the projections, once they were asked

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.coupled_layer, name)
        if isinstance(value, MethodType) and value.__self__ is self.coupled_layer:
            return MethodType(value.__func__, self)  # the layer's own methods see the view as well
        return value

    def couple(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Couple (B, T, H, D) and (B, T, G, D); what comes out has the precision that went in."""
        coupling = self.coupled_layer.coupling
        if isinstance(coupling, Coupling):
            coupling.check_not_offloaded(q, module_class=type(self.coupled_layer).__name__)
        own = next(coupling.parameters(), q).dtype
        if own == q.dtype and not is_autocast_enabled(q):
            out: tuple[Tensor, Tensor] = coupling(q, k)
            return out
        # a coupling is small: it works in a precision that loses nothing of the tokens or of its weights
        exact = torch.promote_types(q.dtype, own)
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
            new_q, new_k = coupling(q.to(exact), k.to(exact))
        return new_q.to(q.dtype), new_k.to(k.dtype)

    def check_projections_called(self) -> None:
        """The layer's forward is over."""
        if self.coupled_input is None:
            raise InputError(
                f"{type(self.coupled_layer).__name__} never asked for its queries and keys, so the coupling "
                "would have no effect: detach this layer"
            )


class SeparateQKVProxy(LayerProxy):
    """Whichever projection is asked first, both run; the other's half is kept until it is asked for.

    What is prepared for inference yields the values as well, for when they are asked for.
    """

    def __init__(self, layer: CoupledAttention, has_past: bool) -> None:
        super().__init__(layer, has_past)
        self.coupled_q: Tensor | None = None
        self.coupled_k: Tensor | None = None
        setattr(self, layer.coupling_info.q_name, self.project_queries)
        setattr(self, layer.coupling_info.k_name, self.project_keys)

    def project_queries(self, x: Tensor, *extra_args: Any) -> Tensor | None:
        self._check_no_extra_args(extra_args)
        if self.coupled_input is not x:
            self._project(x)
        q, self.coupled_q = self.coupled_q, None
        return q

    def project_keys(self, x: Tensor, *extra_args: Any) -> Tensor | None:
        self._check_no_extra_args(extra_args)
        if self.coupled_input is not x:
            self._project(x)
        k, self.coupled_k = self.coupled_k, None
        return k

    def _project(self, x: Tensor) -> None:
        if self.coupled_input is not None:
            raise InputError(
                f"{type(self.coupled_layer).__name__} projects queries and keys from different tensors, as "
                "cross-attention does, so no token has both: detach this layer"
            )
        self.coupled_input = x
        found = self._fusable(x)
        if found is not None and self._project_prepared(x, *found):
            return
        if found is not None and found[0].multiplies(found[1]):
            q, k = found[0].together(x, found[1])
        else:
            plan, layer = self.coupled_layer.coupling_info, self.coupled_layer
            q, k = layer.get_submodule(plan.q_name)(x), layer.get_submodule(plan.k_name)(x)
            q = q.view(-1, q.shape[-2], plan.heads.n_q, plan.heads.head_dim)
            k = k.view(-1, k.shape[-2], plan.heads.n_k, plan.heads.head_dim)
            q, k = self.couple(q, k)
        q, k = (part.reshape(*x.shape[:-1], -1) for part in (q, k))
        if getattr(getattr(self, "config", None), "clip_qkv", None) is not None and torch.is_grad_enabled():
            q, k = q.clone(), k.clone()  # the layer clips in place what the backward pass has kept
        self.coupled_q, self.coupled_k = q, k

    def _project_prepared(self, x: Tensor, coupling: Coupling, qk_circuit: FactorizedQK) -> bool:
        """Queries, keys and values from what is prepared for inference, if anything is."""
        name = self.coupled_layer.coupling_info.v_name or ""
        to_v = self.coupled_layer._modules.get(name)
        v = to_v if is_plain_linear(to_v) else None
        at_rest = coupling.resting(x, qk_circuit, v, self.coupled_has_past)
        if at_rest is None:
            return False
        self.coupled_q, self.coupled_k, values = at_rest(x)
        if v is not None:
            setattr(self, name, lambda given: values if given is x else v(given))
        return True

    def _check_no_extra_args(self, extra_args: tuple[Any, ...]) -> None:
        if extra_args:
            raise InputError(
                f"{type(self.coupled_layer).__name__} gives its projections more than tokens, so no coupling "
                "can stand behind them: detach this layer"
            )

    def _fusable(self, x: Tensor) -> tuple[Coupling, FactorizedQK] | None:
        """What may project and couple as one: nothing has been put in anything's place since."""
        plan, parts = self.coupled_layer.coupling_info, self.coupled_layer._modules
        circuit, coupling, to_q, to_k = (
            plan.qk_circuit,
            parts["coupling"],
            parts[plan.q_name],
            parts[plan.k_name],
        )
        if (
            circuit is not None
            and circuit._modules["q"] is to_q
            and circuit._modules["k"] is to_k
            and is_plain_linear(to_q)
            and is_plain_linear(to_k)
            and x.dim() == 3
            and isinstance(coupling, Coupling)
            and not is_autocast_enabled(x)
        ):
            return coupling, circuit
        return None

    def check_projections_called(self) -> None:
        super().check_projections_called()
        if (self.coupled_q is None) != (self.coupled_k is None):
            raise InputError(
                f"{type(self.coupled_layer).__name__} used its query without its own key, as layers do that "
                "share another layer's keys: detach this layer"
            )


class FusedQKVProxy(LayerProxy):
    """One projection gives queries, keys and values: cut, couple, and put together again."""

    def __init__(self, layer: CoupledAttention, has_past: bool) -> None:
        super().__init__(layer, has_past)
        setattr(self, layer.coupling_info.q_name, self.project_qkv)

    def project_qkv(self, x: Tensor) -> Tensor:
        layer, plan = self.coupled_layer, self.coupled_layer.coupling_info
        assert plan.layout is not None
        self.coupled_input = x
        out: Tensor = getattr(layer, plan.q_name)(x)
        q, k, v = plan.layout.split(out.view(-1, *out.shape[-2:]))
        return plan.layout.fuse(*self.couple(q, k), v).view(out.shape)


def couple_layer(attn_layer: AttentionLayer, spec: str, coupling: nn.Module) -> None:
    """Give one layer its coupling and its class."""
    layer = attn_layer.module
    coupling.train(layer.training)
    layer.coupling = coupling
    plan = CouplingInfo(
        spec,
        attn_layer.q_name,
        attn_layer.k_name,
        attn_layer.v_name,
        attn_layer.heads,
        attn_layer.layout,
        _qk_circuit(attn_layer, coupling),
    )
    layer.coupling_info = plan  # type: ignore[assignment]
    _change_class(layer, coupled_class(type(layer)))


def uncouple_layer(layer: CoupledAttention) -> None:
    del layer.coupling, layer.coupling_info
    _change_class(layer, layer.original_class)


def _qk_circuit(attn_layer: AttentionLayer, coupling: nn.Module) -> FactorizedQK | None:
    """The layer's own projections as a circuit of ours, for couplings that use products of their weights."""
    q, k = (
        attn_layer.module.get_submodule(attn_layer.q_name),
        attn_layer.module.get_submodule(attn_layer.k_name),
    )
    if not isinstance(coupling, Coupling):
        return None
    if attn_layer.layout is not None or not isinstance(q, nn.Linear) or not isinstance(k, nn.Linear):
        return None
    if (q.bias is None) != (k.bias is None) or not is_plain_linear(q) or not is_plain_linear(k):
        return None
    circuit = FactorizedQK(1, HeadShapes(1, 1, 1, 1, 1, 1, 1), bias=False, device="meta")
    circuit.head_shapes, circuit.q, circuit.k = attn_layer.heads, q, k
    return circuit


def _change_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    layer.__class__ = cls
    if "_old_forward" in vars(layer):  # accelerate hooks a layer by keeping its old forward, bound
        layer._old_forward = MethodType(cls.forward, layer)  # type: ignore[assignment]

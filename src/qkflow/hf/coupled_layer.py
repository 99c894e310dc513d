"""An attention layer of another library whose projections return coupled queries and keys.

Attention layers start alike: project the tokens to queries and keys, split them into heads, then normalize
and rotate. The coupling runs between the first two steps, so only the names of the projections are needed. A
coupled layer has

- a child `coupling` with all added weights: names, weights and hooks of the model stay as they are;
- a subclass of its original class, whose forward runs the original forward on a `LayerProxy`: the same layer,
  except that its projections return coupled queries and keys.

The proxy lives for one call. Nothing is kept between calls, so KV caches, activation checkpointing, threads
and `torch.compile` need no special care; the exception is `prepare_for_inference`, which is explicit.
Whatever replaced a projection (LoRA, a quantized or offloaded layer) is called as in the original forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from qkflow.attention.couplings.base import Coupling, PreparedQK
from qkflow.attention.inference import PreparableModule
from qkflow.attention.projections import (
    FactorizedQK,
    HeadShapes,
    can_fuse,
    check_not_offloaded,
    is_autocast_enabled,
    is_plain_linear,
)
from qkflow.errors import InputError
from qkflow.hf.attention_layers import AttentionLayer
from qkflow.hf.qkv_layout import QKVLayout

PREPARED = ("prepared_qk", "skips_identity")  # attributes of a prepared layer


@dataclass(frozen=True)
class CouplingInfo:
    """The coupling spec of a layer, and which projections compute its queries and keys."""

    spec: str
    q_name: str
    k_name: str
    v_name: str | None
    heads: HeadShapes
    layout: QKVLayout | None  # of a fused projection


class CoupledAttention(PreparableModule):
    """Mixin of a coupled layer; `coupled_class` puts it before the original class."""

    roles: ClassVar[dict[str, str]] = {"coupling": "coupling"}
    original_class: ClassVar[type[nn.Module]]
    coupling: nn.Module
    coupling_info: CouplingInfo
    prepared_qk: PreparedQK | None = None  # of `prepare_for_inference`
    skips_identity: bool = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.skips_identity and not torch.is_grad_enabled():
            return self.original_class.forward(self, *args, **kwargs)
        proxy = (SeparateQKVProxy if self.coupling_info.layout is None else FusedQKVProxy)(self)
        out = self.original_class.forward(proxy, *args, **kwargs)
        proxy.check_projections_called()
        return out

    def prepare_for_inference(self) -> None:
        """Fuse the projections and the coupling's linear parts into one matmul, from the current weights.

        A coupling that is the identity is skipped: the original forward runs. Layers whose projections are
        fused, adapted, hooked, or of another dtype than the coupling keep the regular forward.
        """
        self.check_eval_mode()
        self.release_prepared()
        coupling = self.coupling
        if not isinstance(coupling, Coupling) or not can_fuse(coupling):
            return
        if coupling.is_identity():
            self.skips_identity = True
            return
        qk = self._plain_qk()
        if qk is None or not can_fuse(coupling, qk.q.weight.dtype):
            return
        prepared = coupling.prepare_for_inference(qk)
        v = self._modules.get(self.coupling_info.v_name or "")
        if prepared is not None and is_plain_linear(v) and v.weight.dtype == prepared.weight.dtype:
            prepared = prepared.with_values(v)
        self.prepared_qk = prepared

    def _plain_qk(self) -> FactorizedQK | None:
        """Return the projections as a qkflow circuit that shares their weights, if they are plain Linear."""
        info = self.coupling_info
        q, k = self._modules.get(info.q_name), self._modules.get(info.k_name)
        if info.layout is not None or not is_plain_linear(q) or not is_plain_linear(k):
            return None
        if q.weight.is_meta or q.weight.dtype != k.weight.dtype or (q.bias is None) != (k.bias is None):
            return None
        circuit = FactorizedQK(1, info.heads, bias=False, device="meta")
        circuit.q, circuit.k = q, k
        return circuit

    def release_prepared(self) -> None:
        self.prepared_qk, self.skips_identity = None, False

    def __reduce__(self) -> Any:
        # The class is created at run time, so pickle cannot import it by name. Copies are not prepared.
        state = {key: value for key, value in self.__dict__.items() if key not in PREPARED}
        return _new_coupled_layer, (self.original_class,), state


_coupled_classes: dict[type[nn.Module], type[CoupledAttention]] = {}


def coupled_class(original_class: type[nn.Module]) -> type[CoupledAttention]:
    """Return the coupled subclass of an attention class, created once."""
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
    """Stand-in for `self` in one call of the original forward."""

    def __init__(self, layer: CoupledAttention) -> None:
        self.coupled_layer = layer
        self.coupled_input: Tensor | None = None  # set by the first call of a projection

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.coupled_layer, name)
        if isinstance(value, MethodType) and value.__self__ is self.coupled_layer:
            return MethodType(value.__func__, self)  # methods of the layer use the proxy, too
        return value

    def couple(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Couple q (B, T, H, D) and k (B, T, G, D); the dtype stays.

        Under autocast, or if its parameters have another dtype, the coupling runs in the wider dtype.
        """
        coupling = self.coupled_layer.coupling
        parameter = next(coupling.parameters(), q)
        check_not_offloaded(parameter, q, type(self.coupled_layer).__name__)
        if parameter.dtype == q.dtype and not is_autocast_enabled(q):
            out: tuple[Tensor, Tensor] = coupling(q, k)
            return out
        dtype = torch.promote_types(q.dtype, parameter.dtype)
        with torch.autocast("cpu" if q.is_meta else q.device.type, enabled=False):
            new_q, new_k = coupling(q.to(dtype), k.to(dtype))
        return new_q.to(q.dtype), new_k.to(k.dtype)

    def check_projections_called(self) -> None:
        """Raise if the original forward ended without calling the projections."""
        if self.coupled_input is None:
            raise InputError(
                f"{type(self.coupled_layer).__name__} did not call its query and key projections, so the "
                "coupling has no effect: detach this layer",
                code="projections-not-called",
            )


class SeparateQKVProxy(LayerProxy):
    """Proxy of a layer with separate projections: the first call computes both q and k."""

    def __init__(self, layer: CoupledAttention) -> None:
        super().__init__(layer)
        self.coupled_q: Tensor | None = None
        self.coupled_k: Tensor | None = None
        setattr(self, layer.coupling_info.q_name, self.project_queries)
        setattr(self, layer.coupling_info.k_name, self.project_keys)

    def project_queries(self, x: Tensor, *extra_args: Any) -> Tensor | None:
        self._project(x, extra_args)
        q, self.coupled_q = self.coupled_q, None
        return q

    def project_keys(self, x: Tensor, *extra_args: Any) -> Tensor | None:
        self._project(x, extra_args)
        k, self.coupled_k = self.coupled_k, None
        return k

    def _project(self, x: Tensor, extra_args: tuple[Any, ...]) -> None:
        """Project and couple tokens x (…, T, dim) unless that is done already."""
        layer = self.coupled_layer
        if extra_args:
            raise InputError(
                f"{type(layer).__name__} passes its projections more arguments than the tokens: detach this "
                "layer",
                code="unsupported-projection-call",
            )
        if self.coupled_input is x:
            return
        if self.coupled_input is not None:
            raise InputError(
                f"{type(layer).__name__} projects queries and keys from different tensors, as "
                "cross-attention does, so no token has both: detach this layer",
                code="cross-attention",
            )
        self.coupled_input = x
        self.coupled_q, self.coupled_k = self._project_and_couple(x)

    def _project_and_couple(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer, info = self.coupled_layer, self.coupled_layer.coupling_info
        prepared = layer.prepared_qk
        if prepared is not None and not torch.is_grad_enabled() and not is_autocast_enabled(x):
            return self._run_prepared(prepared, x)
        q, k = getattr(layer, info.q_name)(x), getattr(layer, info.k_name)(x)
        q = q.view(-1, q.shape[-2], info.heads.n_q, info.heads.head_dim)
        k = k.view(-1, k.shape[-2], info.heads.n_k, info.heads.head_dim)
        q, k = (part.reshape(*x.shape[:-1], -1) for part in self.couple(q, k))
        if torch.is_grad_enabled() and getattr(getattr(layer, "config", None), "clip_qkv", None) is not None:
            q, k = q.clone(), k.clone()  # OLMo clips in place what autograd has saved for the backward pass
        return q, k

    def _run_prepared(self, prepared: PreparedQK, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, values = prepared(x.reshape(-1, *x.shape[-2:]))
        v_name = self.coupled_layer.coupling_info.v_name
        if prepared.n_value_rows and v_name is not None:
            values = values.view(*x.shape[:-1], -1)
            project_values = getattr(self.coupled_layer, v_name)
            setattr(self, v_name, lambda tokens: values if tokens is x else project_values(tokens))
        return q.reshape(*x.shape[:-1], -1), k.reshape(*x.shape[:-1], -1)

    def check_projections_called(self) -> None:
        super().check_projections_called()
        if (self.coupled_q is None) != (self.coupled_k is None):
            raise InputError(
                f"{type(self.coupled_layer).__name__} used its query without its own key, as layers with "
                "shared keys do: detach this layer",
                code="projections-not-called",
            )


class FusedQKVProxy(LayerProxy):
    """Proxy of a layer with one fused projection: split its output, couple, and fuse it again."""

    def __init__(self, layer: CoupledAttention) -> None:
        super().__init__(layer)
        setattr(self, layer.coupling_info.q_name, self.project_qkv)

    def project_qkv(self, x: Tensor) -> Tensor:
        layer, info = self.coupled_layer, self.coupled_layer.coupling_info
        assert info.layout is not None
        self.coupled_input = x
        out: Tensor = getattr(layer, info.q_name)(x)
        q, k, v = info.layout.split(out.view(-1, *out.shape[-2:]))
        return info.layout.fuse(*self.couple(q, k), v).view(out.shape)


def couple_layer(attn_layer: AttentionLayer, spec: str, coupling: nn.Module) -> None:
    """Add `coupling` to one layer, in place."""
    layer = attn_layer.module
    coupling.train(layer.training)
    layer.coupling = coupling
    info = CouplingInfo(
        spec,
        attn_layer.q_name,
        attn_layer.k_name,
        attn_layer.v_name,
        attn_layer.heads,
        attn_layer.layout,
    )
    layer.coupling_info = info  # type: ignore[assignment]
    _change_class(layer, coupled_class(type(layer)))


def uncouple_layer(layer: CoupledAttention) -> None:
    """Invert `couple_layer`."""
    del layer.coupling, layer.coupling_info
    for name in PREPARED:
        vars(layer).pop(name, None)
    _change_class(layer, layer.original_class)


def active_coupling(layer: CoupledAttention) -> nn.Module:
    """Return the coupling that runs: PEFT's `modules_to_save` keeps a trained copy next to the original."""
    copies = getattr(layer.coupling, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return layer.coupling
    active: Any = layer.coupling.active_adapters
    return copies[active[0]]


def _change_class(layer: nn.Module, cls: type[nn.Module]) -> None:
    layer.__class__ = cls
    if "_old_forward" in vars(layer):  # an accelerate hook holds the bound forward it wraps
        layer._old_forward = MethodType(cls.forward, layer)  # type: ignore[assignment]

"""Attach couplings to the attention layers of a `transformers` model, and detach or merge them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from qkflow.attention import Attention, couplings
from qkflow.attention.couplings import Coupling
from qkflow.attention.init import InitScheme, ParamSampler, SupportsInit
from qkflow.attention.registry import Spec
from qkflow.errors import InputError, join_limited
from qkflow.hf.attention_layers import (
    AttentionLayer,
    check_drift_foldable,
    check_no_cross_attention,
    cross_attention_layers,
    find_attention_layers,
    fold_drift,
    get_factory_kwargs,
    unsupported_layers,
)
from qkflow.hf.coupled_layer import CoupledAttention, active_coupling, couple_layer, uncouple_layer

# parameters that PEFT adds outside of adapter layers
PEFT_PARAMETER_NAMES = (".modules_to_save.", "prompt_encoder.", "adaption_prompt", "adaption_gate")


def attach(
    model: nn.Module,
    coupling: str | Spec = "affine",
    *,
    layers: str | Iterable[int | str] | None = None,
    init: str | InitScheme = "gpt2",
    seed: int | None = None,
    freeze_base: bool = False,
    **options: Any,
) -> nn.Module:
    """Couple the queries and keys of a `transformers` model (or one with the same structure), in place.

        model = AutoModelForCausalLM.from_pretrained("gpt2")
        attach(model, "affine", hidden_dim=16)            # the same as "affine:hidden_dim=16"

    layers         self-attention layers: indices from 0 (negative from the end), module names, or name
                   patterns ("decoder.*"). Default: all; a model with attention that cannot be coupled
                   (cross-attention, linear attention, latent keys) needs an explicit choice.
    init, seed     init of the coupling's networks, reproducible with a seed
    freeze_base    train the coupling alone

    A coupling with identity init (`affine`) leaves the output of the model bit-identical.
    """
    parsed = Spec.parse(coupling)
    spec = couplings.check(Spec(parsed.name, {**parsed.options, **options}))
    base = unwrap_model(model)  # its parameter names seed the init, whatever wraps it
    selected = _select_layers(base, layers)
    for layer in selected:
        check_can_attach(layer)
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    for layer in selected:
        module = couplings.build(spec, layer.heads, get_factory_kwargs(layer.q, base))
        _init_coupling(
            module, ParamSampler(InitScheme.parse(init), seed, len(selected), f"{layer.name}.coupling")
        )
        couple_layer(layer, str(spec), module)
    if freeze_base:
        freeze_base_model(model)
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, data-parallel and PEFT wrappers."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module):
            return unwrap_model(inner)
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def detach(model: nn.Module) -> nn.Module:
    """Remove every coupling, in place: the model is as before `attach`."""
    for _, layer in named_coupled_layers(model):
        uncouple_layer(layer)
    return model


def merge(model: nn.Module) -> nn.Module:
    """Fold every linear coupling into the query projections, in place: a plain `transformers` model remains.

    q + d_h·k = (W_Q + d_h·W_K)·x for each head h, so the output is the same up to rounding.
    """
    coupled = named_coupled_layers(model)
    if not coupled:
        raise InputError("cannot merge: no coupling is attached to this model", code="no-coupling")
    layers = {layer.name: layer for layer in find_attention_layers(model)}
    for name, module in coupled:  # check all before changing any
        if _linear_drift(module) is None:
            raise InputError(
                f"cannot merge '{name}': its coupling '{module.coupling_info.spec}' is not linear; keep it "
                "attached and save it with hf.save_adapter",
                code="merge-not-linear",
            )
        check_drift_foldable(layers[name])
    _check_weights_not_shared(model, (layers[name] for name, _ in coupled))
    for name, module in coupled:
        drift = _linear_drift(module)
        assert drift is not None, "checked above"
        fold_drift(layers[name], drift)
    return detach(model)


def _linear_drift(layer: CoupledAttention) -> Tensor | None:
    """Return d (H,) if the coupling of a layer is q + d_h·k, else None."""
    coupling = active_coupling(layer)
    return coupling.linear_drift() if isinstance(coupling, Coupling) else None


def prepare_for_inference(model: nn.Module) -> nn.Module:
    """Fuse projections and coupling of every layer into one matmul, from the current weights, in place.

    A coupling that is the identity is skipped: the original layer runs. `.train()`, moving the model and
    loading weights undo it. Weights changed in any other way are not detected: call this again. Layers whose
    projections are fused, adapted, hooked, or of another dtype than the coupling keep the regular forward.
    """
    for module in model.modules():
        if isinstance(module, CoupledAttention | Attention):
            module.prepare_for_inference()
    return model


def _check_weights_not_shared(model: nn.Module, attn_layers: Iterable[AttentionLayer]) -> None:
    """Raise if another module uses the same query weights: it would get the drift as well."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for layer in attn_layers:
        if any(owners[id(p)] > 1 for p in layer.q.parameters()):
            raise InputError(
                f"cannot merge '{layer.name}': another layer shares the weights of '{layer.q_name}'; keep "
                "the coupling attached and save it with hf.save_adapter",
                code="shared-weights",
            )


def named_coupled_layers(model: nn.Module) -> list[tuple[str, CoupledAttention]]:
    """Return (name, layer) of every coupled layer."""
    modules = model.named_modules()
    return [(name, module) for name, module in modules if isinstance(module, CoupledAttention)]


def freeze_base_model(model: nn.Module) -> None:
    """Set `requires_grad` for couplings only; PEFT adapters keep theirs."""
    adapters = {
        id(parameter)
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())  # PEFT's list of what it added
        for parameter in _parameters(getattr(module, name, None))
    }
    for name, parameter in model.named_parameters():
        if ".coupling." in name:
            parameter.requires_grad_(True)
        elif id(parameter) not in adapters and not any(part in name for part in PEFT_PARAMETER_NAMES):
            parameter.requires_grad_(False)


def _parameters(part: object) -> Iterable[nn.Parameter]:
    if isinstance(part, nn.Module):
        return part.parameters()
    return [part] if isinstance(part, nn.Parameter) else []


def print_trainable_parameters(model: nn.Module) -> tuple[int, int, int]:
    """Print and return the numbers of trainable, coupling and all parameters."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = sum(p.numel() for _, layer in named_coupled_layers(model) for p in layer.coupling.parameters())
    total = sum(p.numel() for p in model.parameters())
    print(
        f"trainable params: {trainable:,} || coupling: {added:,} || all params: {total:,} || "
        f"trainable%: {100 * trainable / max(total, 1):.4f}"
    )
    return trainable, added, total


def _select_layers(model: nn.Module, layers: str | Iterable[int | str] | None) -> list[AttentionLayer]:
    available = find_attention_layers(model)
    if layers is None:
        _check_all_supported(model, available)
        return available
    choices: list[int | str] = [layers] if isinstance(layers, str) else _as_list(layers)
    if not choices:
        raise InputError(
            "layers is empty: name at least one attention layer, or leave it out for all", code="no-layers"
        )
    selected: dict[str, AttentionLayer] = {}
    for choice in choices:
        for layer in _match_layers(model, choice, available):
            selected[layer.name] = layer
    return list(selected.values())


def _as_list(layers: Iterable[int | str]) -> list[int | str]:
    try:
        return [layer if isinstance(layer, str) else operator.index(layer) for layer in layers]
    except TypeError:
        raise InputError(
            f"layers takes indices and names, e.g. layers=[0, -1] or layers='decoder.*', not {layers!r}",
            code="invalid-layers",
        ) from None


def _match_layers(
    model: nn.Module, choice: int | str, available: list[AttentionLayer]
) -> list[AttentionLayer]:
    """Return the layers that one entry of `layers=` selects."""
    if isinstance(choice, str):
        matches = [layer for layer in available if fnmatchcase(layer.name, choice)]
        if matches:
            return matches
        if any(fnmatchcase(name, choice) for name in cross_attention_layers(model)):
            raise InputError(
                f"'{choice}' selects only cross-attention, where no token has both a query and a key: select "
                f"self-attention layers, e.g. '{available[-1].name}'",
                code="cross-attention",
            )
        names = join_limited([layer.name for layer in available], 4)
        raise InputError(
            f"no self-attention layer matches '{choice}': the model has {names}", code="unknown-layer"
        )
    if not -len(available) <= choice < len(available):
        raise InputError(
            f"there is no attention layer {choice}: the model has {len(available)}, from 0",
            code="unknown-layer",
        )
    return [available[choice]]


def _check_all_supported(model: nn.Module, available: list[AttentionLayer]) -> None:
    """Raise if `layers=None` would leave out attention layers that cannot be coupled."""
    check_no_cross_attention(
        model,
        f"select self-attention layers with layers=, e.g. layers='{available[-1].name}' or "
        f"layers=range({len(available)}) for all, or pass a part of the model, e.g. model.get_encoder()",
    )
    unsupported = unsupported_layers(model, available)
    if unsupported:
        raise InputError(
            f"{join_limited(unsupported)} cannot be coupled, having no keys of their own or no softmax: "
            f"select among the {len(available)} other attention layers with layers=, e.g. "
            f"layers=range({len(available)}) for all of them",
            code="unsupported-attention",
        )


def check_can_attach(attn_layer: AttentionLayer) -> None:
    """Raise unless this layer can be given a coupling."""
    name, module = attn_layer.name, attn_layer.module
    if isinstance(module, CoupledAttention):
        raise InputError(
            f"'{name}' already has the coupling '{module.coupling_info.spec}': call hf.detach(model) first",
            code="already-coupled",
        )
    if hasattr(module, "coupling"):
        raise InputError(
            f"'{name}' has an attribute `coupling` of its own, so none can be attached", code="name-conflict"
        )
    if "forward" in vars(module) and "_old_forward" not in vars(module):  # the latter is accelerate's
        raise InputError(
            f"the forward of '{name}' was replaced on the instance, so a coupling would not run: attach "
            "first, then replace it",
            code="forward-replaced",
        )
    if getattr(module, "share_att_key", False) and getattr(module, "relative_attention", True):
        raise InputError(
            f"'{name}' ({type(module).__name__}) projects positions with its query and key projections "
            "(share_att_key=True), which a coupling does not support: use a model with share_att_key=False",
            code="shared-key-projection",
        )
    _ = attn_layer.layout  # raises if it cannot be inferred


@torch.no_grad()
def _init_coupling(coupling: nn.Module, sampler: ParamSampler) -> None:
    for name, module in coupling.named_modules():
        if isinstance(module, SupportsInit):
            module.init_parameters(
                ParamSampler(sampler.scheme, sampler.seed, sampler.n_layers, f"{sampler.prefix}.{name}")
            )

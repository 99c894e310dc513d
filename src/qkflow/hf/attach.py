"""Put a coupling into the attention layers of a model that somebody else wrote, and take it out again.

`attention_layers` finds the layers and their projections; `coupled_layer` is what replaces a layer.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from qkflow.attention import couplings
from qkflow.attention.init import InitScheme, ParamSampler, SupportsInit
from qkflow.attention.registry import Spec
from qkflow.errors import InputError
from qkflow.hf.attention_layers import (
    AttentionLayer,
    check_drift_foldable,
    find_attention_layers,
    fold_drift,
    get_factory_kwargs,
    unsupported_layers,
)
from qkflow.hf.coupled_layer import CoupledAttention, couple_layer, uncouple_layer

PEFT_PARAMETER_NAMES = (
    ".modules_to_save.",
    "prompt_encoder.",
    "adaption_prompt",
    "adaption_gate",
)  # beside layers


def attach(
    model: nn.Module,
    coupling: str | Spec = "affine",
    *,
    layers: Iterable[int] | None = None,
    init: str | InitScheme = "gpt2",
    seed: int | None = None,
    freeze_base: bool = False,
    **options: Any,
) -> nn.Module:
    """Couple the queries and keys of a `transformers` model (or one built like it), in place.

        model = AutoModelForCausalLM.from_pretrained("gpt2")
        attach(model, "affine", hidden=16)            # the same as "affine:hidden=16"

    layers         numbers of the attention layers that can be coupled, counted from 0 (negative: from the
                   end); default all, which must be all that the model has
    start, seed    how the coupling's networks start; a seed makes it repeatable
    freeze_base    train the coupling alone

    Couplings that start as the identity (`affine`) leave the model's output bit for bit as it was.
    """
    given = Spec.parse(coupling)
    spec = couplings.check(Spec(given.name, {**given.options, **options}))
    base = unwrap_model(model)  # names, and with them seeded starts, are those of the model itself
    sites = _select_layers(base, layers)
    for site in sites:
        check_can_attach(site)
    seed = int(torch.randint(2**62, ())) if seed is None else seed
    for site in sites:
        part = couplings.build(
            spec, site.heads, get_factory_kwargs(site.module.get_submodule(site.q_name), base)
        )
        _init_coupling(part, ParamSampler(InitScheme.parse(init), seed, len(sites), f"{site.name}.coupling"))
        couple_layer(site, str(spec), part)
    if freeze_base:
        freeze_base_model(model)
    return model


def unwrap_model(model: nn.Module) -> nn.Module:
    """The model inside what `torch.compile`, data parallelism and PEFT wrap around it."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module):
            return unwrap_model(inner)
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def detach(model: nn.Module) -> nn.Module:
    """Take every coupling off again, in place: the model is what it was before `attach`."""
    for _, layer in named_coupled_layers(model):
        uncouple_layer(layer)
    return model


def merge(model: nn.Module) -> nn.Module:
    """Fold every `drift` into the query projections, in place: a plain `transformers` model remains.

    q + Δ·k = (W_Q + Δ·W_K)·x for each head, so the output stays the same up to rounding.
    """
    layers = list(named_coupled_layers(model))
    if not layers:
        raise InputError("no coupling is attached to this model, so there is nothing to merge")
    sites = {site.name: site for site in find_attention_layers(model)}
    for name, layer in layers:  # all of them are checked before the first is changed
        if Spec.parse(layer.coupling_info.spec).name != "drift":
            raise InputError(
                f"'{name}' has the coupling '{layer.coupling_info.spec}', which is not linear and cannot "
                "become weights: only 'drift' merges; keep the coupling attached and save it with hf.save_adapter"
            )
        check_drift_foldable(sites[name])
    _check_weights_not_shared(model, (sites[name] for name, _ in layers))
    for name, layer in layers:
        fold_drift(sites[name], layer.coupling.take_linear_drift())  # type: ignore[operator]
    return detach(model)


def _check_weights_not_shared(model: nn.Module, attn_layers: Iterable[AttentionLayer]) -> None:
    """An error if query weights belong to other layers too, which would get the drift as well, or twice."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for site in attn_layers:
        if any(owners[id(p)] > 1 for p in site.module.get_submodule(site.q_name).parameters()):
            raise InputError(
                f"'{site.name}.{site.q_name}' shares its weights with another layer, so no drift can be folded "
                "into them: keep the coupling attached and save it with hf.save_adapter"
            )


def named_coupled_layers(model: nn.Module) -> list[tuple[str, CoupledAttention]]:
    """The coupled layers of a model and their names."""
    found = model.named_modules()
    return [(name, module) for name, module in found if isinstance(module, CoupledAttention)]


def freeze_base_model(model: nn.Module) -> None:
    """Train the couplings, and adapters that PEFT has put in, but nothing of the model itself."""
    adapters = {
        id(parameter)
        for module in model.modules()
        for name in getattr(module, "adapter_layer_names", ())  # what PEFT calls the parts that it put in
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
    """Print and return how many parameters train, belong to couplings, and exist."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    added = sum(p.numel() for _, layer in named_coupled_layers(model) for p in layer.coupling.parameters())
    total = sum(p.numel() for p in model.parameters())
    print(
        f"trainable params: {trainable:,} || coupling: {added:,} || all params: {total:,} || "
        f"trainable%: {100 * trainable / max(total, 1):.4f}"
    )
    return trainable, added, total


def _select_layers(model: nn.Module, layers: Iterable[int] | None) -> list[AttentionLayer]:
    sites = find_attention_layers(model)
    if layers is None:
        left = unsupported_layers(model, sites)
        if left:
            raise InputError(
                f"{', '.join(left[:3])}{f' and {len(left) - 3} more' if len(left) > 3 else ''} cannot be "
                "coupled, having no keys of their own or no softmax: layers=… chooses among the "
                f"{len(sites)} attention layers that can, e.g. layers=range({len(sites)}) for all of them"
            )
        return sites
    try:
        numbers = [operator.index(layer) for layer in layers]
    except TypeError:
        raise InputError(
            f"layers are whole numbers, counted from 0 or from the end, e.g. layers=[0, -1], not {layers!r}"
        ) from None
    if not numbers:
        raise InputError("layers is empty: name at least one attention layer, or leave it out for all")
    for number in numbers:
        if not -len(sites) <= number < len(sites):
            raise InputError(f"there is no attention layer {number}: the model has {len(sites)}, from 0")
    return [sites[number] for number in dict.fromkeys(number % len(sites) for number in numbers)]


def check_can_attach(attn_layer: AttentionLayer) -> None:
    """An error unless this layer can be given a coupling."""
    if isinstance(attn_layer.module, CoupledAttention):
        raise InputError(
            f"'{attn_layer.name}' already has the coupling '{attn_layer.module.coupling_info.spec}': detach(model) first"
        )
    if hasattr(attn_layer.module, "coupling"):
        raise InputError(
            f"'{attn_layer.name}' has an attribute `coupling` of its own, so none can be attached"
        )
    if "forward" in vars(attn_layer.module) and "_old_forward" not in vars(attn_layer.module):
        raise InputError(
            f"the forward of '{attn_layer.name}' has been replaced on the layer itself, so a coupling would never "
            "run: attach first, then add what replaced it"
        )
    _ = attn_layer.layout  # asks the model, which may not know


@torch.no_grad()
def _init_coupling(coupling: nn.Module, sampler: ParamSampler) -> None:
    for name, module in coupling.named_modules():
        if isinstance(module, SupportsInit):
            module.init_parameters(
                ParamSampler(sampler.scheme, sampler.seed, sampler.n_layers, f"{sampler.prefix}.{name}")
            )

"""Keep only what was attached: a coupling's weights and how to put them back.

coupling.safetensors     the weights, named as in the model, and in its metadata what is in
coupling_config.json     the coupling and the heads of every layer it sits on, for people to read

One file holds all that is loaded, so a save that is cut short leaves one whole coupling: the old or the new.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as write_tensors
from torch import Tensor, nn

from qkflow import files
from qkflow.attention import couplings
from qkflow.errors import InputError
from qkflow.hf.attach import check_can_attach, named_coupled_layers, unwrap_model
from qkflow.hf.attention_layers import AttentionLayer, find_attention_layers, get_factory_kwargs
from qkflow.hf.coupled_layer import CoupledAttention, couple_layer

WEIGHTS_NAME = "coupling.safetensors"
CONFIG_NAME = "coupling_config.json"
FORMAT_VERSION = 1
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def save_adapter(model: nn.Module, folder: str | Path) -> Path:
    """Write the couplings attached to `model`, and nothing else, into `folder`."""
    model, folder = unwrap_model(model), Path(folder)
    if folder.is_file():
        raise InputError(f"'{folder}' is a file: give a folder to save the coupling in")
    layers = named_coupled_layers(model)
    if not layers:
        raise InputError("no coupling is attached to this model, so there is nothing to save")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers:
        for key, value in active_coupling(layer).state_dict().items():
            # a copy: a model that ties its layers ties their couplings too, which safetensors refuses
            tensors[f"{name}.coupling.{key}"] = value.detach().cpu().contiguous().clone()
    config = {
        "format": FORMAT_VERSION,
        "base_model": getattr(getattr(model, "config", None), "name_or_path", ""),
        "model_type": getattr(getattr(model, "config", None), "model_type", ""),
        "layers": {name: _layer_config(layer) for name, layer in layers},
    }
    metadata = {"format": "pt", CONFIG_NAME: json.dumps(config)}
    files.write_atomic(folder / WEIGHTS_NAME, write_tensors(tensors, metadata))
    files.write_json(folder / CONFIG_NAME, config)
    return folder


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Attach to `model`, in place, the couplings that `save` wrote."""
    base, folder = unwrap_model(model), Path(folder)
    config, tensors = _read_adapter(folder)
    sites = {site.name: site for site in find_attention_layers(base)}
    for name, wanted in config["layers"].items():
        _check_compatible(name, wanted, sites, folder)
    parts = {}
    for name, wanted in config["layers"].items():
        site = sites[name]
        where = get_factory_kwargs(site.module.get_submodule(site.q_name), base)
        parts[name] = couplings.build(wanted["coupling"], site.heads, where)
        _load_weights(parts[name], f"{name}.coupling.", tensors, folder)
    for name, part in parts.items():  # once all are known to fit
        couple_layer(sites[name], config["layers"][name]["coupling"], part)
    return model


def active_coupling(layer: CoupledAttention) -> nn.Module:
    """The coupling that runs; PEFT's `modules_to_save` keeps a trained copy beside the original."""
    copies = getattr(layer.coupling, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return layer.coupling
    active: Any = layer.coupling.active_adapters
    return copies[active[0]]


def _layer_config(layer: CoupledAttention) -> dict[str, Any]:
    heads = layer.coupling_info.heads
    return {
        "coupling": layer.coupling_info.spec,
        "n_heads": heads.n_q,
        "n_kv_heads": heads.n_k,
        "head_dim": heads.head_dim,
    }


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of a coupling."""
    if folder.is_file():
        kind = "a pickle, which is never opened" if folder.suffix in PICKLE_SUFFIXES else "a file"
        raise InputError(f"'{folder}' is {kind}: give the folder that hf.save_adapter wrote")
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("*") if other.suffix in PICKLE_SUFFIXES)
        hint = f"; {', '.join(others)} there is a pickle, which is never opened" if others else ""
        raise InputError(
            f"'{folder}' holds no {WEIGHTS_NAME}{hint}: give the folder that hf.save_adapter wrote"
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            written = (file.metadata() or {}).get(CONFIG_NAME)
    except SafetensorError as error:
        raise InputError(f"'{path}' is not a safetensors file ({error}); pickles are never opened") from None
    return _parse_config(written or _read_legacy_config(folder), folder), tensors


def _read_legacy_config(folder: Path) -> str:
    """Where couplings had their config before the weights' file held it."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(f"'{folder}' holds no {CONFIG_NAME}: give the folder that hf.save_adapter wrote")
    return path.read_text("utf-8", errors="replace")


def _parse_config(text: str, folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(text)
        known = config["format"] == FORMAT_VERSION and all(
            {"coupling", "n_heads", "n_kv_heads", "head_dim"} <= set(layer)
            and isinstance(layer["coupling"], str)
            for layer in config["layers"].values()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the config in '{folder}' is not a coupling's ({error})") from None
    if not known:
        raise InputError(
            f"the coupling in '{folder}' has a form that this version does not know: upgrade qkflow"
        )
    if not config["layers"]:
        raise InputError(f"the coupling in '{folder}' names no layer, so there is nothing to attach")
    return config


def _check_compatible(
    name: str, layer_config: dict[str, Any], layers_by_name: dict[str, AttentionLayer], folder: Path
) -> None:
    if name not in layers_by_name:
        raise InputError(
            f"'{folder}' has a coupling for layer '{name}', which this model does not have: its attention "
            f"layers are {', '.join(list(layers_by_name)[:3])}{' …' if len(layers_by_name) > 3 else ''}"
        )
    heads = layers_by_name[name].heads
    ours = (heads.n_q, heads.n_k, heads.head_dim)
    theirs = (layer_config["n_heads"], layer_config["n_kv_heads"], layer_config["head_dim"])
    if ours != theirs:
        raise InputError(
            f"'{folder}' was made for another shape: layer '{name}' had {theirs[0]} query and {theirs[1]} "
            f"key heads of size {theirs[2]}, here it has {ours[0]} and {ours[1]} of size {ours[2]}"
        )
    check_can_attach(layers_by_name[name])


def _load_weights(coupling: nn.Module, prefix: str, tensors: dict[str, Tensor], folder: Path) -> None:
    state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    try:
        coupling.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"the weights in '{folder}' do not fit its config at '{prefix[:-1]}': {reason}"
        ) from None

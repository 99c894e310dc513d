"""Save and load the attached couplings of a model, without the model.

coupling.safetensors     the weights under their names in the model; the metadata holds the config
coupling_config.json     the coupling and head counts of every coupled layer, for people to read

Loading reads the safetensors file alone, so an interrupted save leaves either the old or the new adapter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize_tensors
from torch import Tensor, nn

from qkflow import files
from qkflow.attention import couplings
from qkflow.errors import InputError, join_limited
from qkflow.hf.attach import check_can_attach, named_coupled_layers, unwrap_model
from qkflow.hf.attention_layers import AttentionLayer, find_attention_layers, get_factory_kwargs
from qkflow.hf.coupled_layer import CoupledAttention, active_coupling, couple_layer
from qkflow.plain_data import parse_json, read_text
from qkflow.training.pretrained import check_finite_weights

WEIGHTS_NAME = "coupling.safetensors"
CONFIG_NAME = "coupling_config.json"
FORMAT_VERSION = 1
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def save_adapter(model: nn.Module, folder: str | Path) -> Path:
    """Write the couplings attached to `model` into `folder`."""
    model, folder = unwrap_model(model), Path(folder)
    if folder.is_file():
        raise InputError(f"'{folder}' is a file: give a folder to save the coupling in", code="not-a-folder")
    layers = named_coupled_layers(model)
    if not layers:
        raise InputError("cannot save an adapter: no coupling is attached to this model", code="no-coupling")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers:
        for key, value in active_coupling(layer).state_dict().items():
            # clone: safetensors refuses tensors with shared memory, as tied layers have
            tensors[f"{name}.coupling.{key}"] = value.detach().cpu().contiguous().clone()
    config = {
        "format": FORMAT_VERSION,
        "base_model": getattr(getattr(model, "config", None), "name_or_path", ""),
        "model_type": getattr(getattr(model, "config", None), "model_type", ""),
        "layers": {name: _layer_config(layer) for name, layer in layers},
    }
    metadata = {"format": "pt", CONFIG_NAME: json.dumps(config)}
    files.write_atomic(folder / WEIGHTS_NAME, serialize_tensors(tensors, metadata))
    files.write_json(folder / CONFIG_NAME, config)
    return folder


def load_adapter(model: nn.Module, folder: str | Path) -> nn.Module:
    """Attach the couplings that `save_adapter` wrote to `model`, in place."""
    base, folder = unwrap_model(model), Path(folder)
    config, tensors = _read_adapter(folder)
    layers = {layer.name: layer for layer in find_attention_layers(base)}
    for name, layer_config in config["layers"].items():
        _check_compatible(name, layer_config, layers, folder)
    modules = {}
    for name, layer_config in config["layers"].items():
        factory_kwargs = get_factory_kwargs(layers[name].q, base)
        modules[name] = couplings.build(layer_config["coupling"], layers[name].heads, factory_kwargs)
        _load_weights(modules[name], f"{name}.coupling.", tensors, folder)
    for name, module in modules.items():  # after all of them loaded
        couple_layer(layers[name], config["layers"][name]["coupling"], module)
    return model


def _layer_config(layer: CoupledAttention) -> dict[str, Any]:
    heads = layer.coupling_info.heads
    return {
        "coupling": layer.coupling_info.spec,
        "n_heads": heads.n_q,
        "n_kv_heads": heads.n_k,
        "head_dim": heads.head_dim,
    }


def _read_adapter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the weights of an adapter."""
    if folder.is_file():
        kind = "a pickle, which is never opened" if folder.suffix in PICKLE_SUFFIXES else "a file"
        raise InputError(
            f"'{folder}' is {kind}: give the folder that hf.save_adapter wrote", code="not-a-folder"
        )
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        pickles = sorted(other.name for other in folder.glob("*") if other.suffix in PICKLE_SUFFIXES)
        hint = f" (pickles such as {pickles[0]} are never opened)" if pickles else ""
        raise InputError(
            f"'{folder}' has no {WEIGHTS_NAME}{hint}: give the folder that hf.save_adapter wrote",
            code="no-adapter",
        )
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            config = (file.metadata() or {}).get(CONFIG_NAME)
    except SafetensorError as error:
        raise InputError(
            f"'{path}' is not a safetensors file ({error}); pickles are never opened", code="not-safetensors"
        ) from None
    check_finite_weights(path, tensors.items())
    return _parse_config(config or _read_legacy_config(folder), folder), tensors


def _read_legacy_config(folder: Path) -> str:
    """Read the config of an adapter that does not have it in its safetensors metadata."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise InputError(
            f"'{folder}' has no {CONFIG_NAME}: give the folder that hf.save_adapter wrote", code="no-adapter"
        )
    return read_text(path, code="corrupt-adapter")


def _parse_config(text: str, folder: Path) -> dict[str, Any]:
    config = parse_json(text, f"the config in '{folder}'", code="corrupt-adapter")
    try:
        known = config["format"] == FORMAT_VERSION and all(
            _is_layer_config(layer) for layer in config["layers"].values()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"the config in '{folder}' is not an adapter's ({error}): save the adapter again",
            code="corrupt-adapter",
        ) from None
    if not known:
        raise InputError(
            f"the adapter in '{folder}' was saved by another version of qkflow, in a format that this one "
            "cannot read: use that version, or attach and train it again",
            code="adapter-format",
        )
    if not config["layers"]:
        raise InputError(f"the adapter in '{folder}' has no layers", code="corrupt-adapter")
    layers: dict[str, Any] = config
    return layers


def _is_layer_config(layer: dict[str, Any]) -> bool:
    sizes = (layer.get(name) for name in ("n_heads", "n_kv_heads", "head_dim"))
    return isinstance(layer.get("coupling"), str) and all(type(size) is int for size in sizes)


def _check_compatible(
    name: str, layer_config: dict[str, Any], layers: dict[str, AttentionLayer], folder: Path
) -> None:
    if name not in layers:
        raise InputError(
            f"the adapter in '{folder}' has a coupling for layer '{name}', which this model does not have: "
            f"its attention layers are {join_limited(list(layers))}",
            code="adapter-mismatch",
        )
    heads = layers[name].heads
    expected = (layer_config["n_heads"], layer_config["n_kv_heads"], layer_config["head_dim"])
    if (heads.n_q, heads.n_k, heads.head_dim) != expected:
        raise InputError(
            f"the adapter in '{folder}' does not fit layer '{name}': it has {expected[0]} query and "
            f"{expected[1]} key heads of head_dim {expected[2]}, the layer {heads.n_q} and {heads.n_k} of "
            f"{heads.head_dim}",
            code="adapter-mismatch",
        )
    check_can_attach(layers[name])


def _load_weights(coupling: nn.Module, prefix: str, tensors: dict[str, Tensor], folder: Path) -> None:
    state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    try:
        coupling.load_state_dict(state)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise InputError(
            f"the weights in '{folder}' do not fit its config at '{prefix[:-1]}': {reason}",
            code="corrupt-adapter",
        ) from None

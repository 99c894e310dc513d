"""Hugging Face adapter: attach couplings to `transformers` models, convert qkflow models to and from them.

    from qkflow import hf

Importing this package registers the qkflow architecture with the Auto classes. Attaching needs torch alone;
everything else needs `pip install "qkflow[hf]"`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from qkflow.errors import InputError
from qkflow.hf.adapter_io import load_adapter, save_adapter
from qkflow.hf.attach import (
    attach,
    detach,
    freeze_base_model,
    merge,
    named_coupled_layers,
    prepare_for_inference,
    print_trainable_parameters,
)
from qkflow.hf.attention_functions import register_attention
from qkflow.hf.parameter_roles import infer_parameter_roles, param_groups
from qkflow.hf.reinit import reinitialize
from qkflow.hf.split_qkv import fuse_qkv, split_fused_qkv

# names whose modules import `transformers`
_LAZY_IMPORTS = {
    "QKFlowConfig": "modeling",
    "QKFlowModel": "modeling",
    "QKFlowForCausalLM": "modeling",
    "QKFlowForSequenceClassification": "modeling",
    "PaceCallback": "trainer",
    "to_transformers": "convert",
    "from_transformers": "convert",
    "to_llama": "convert",
    "from_llama": "convert",
    "load_model_and_tokenizer": "pretrained",
    "export_model": "pretrained",
    "import_model": "pretrained",
    "evaluate": "lm_eval",
}

__all__ = [
    "attach",
    "detach",
    "freeze_base_model",
    "fuse_qkv",
    "infer_parameter_roles",
    "load_adapter",
    "merge",
    "named_coupled_layers",
    "param_groups",
    "prepare_for_inference",
    "print_trainable_parameters",
    "register_attention",
    "reinitialize",
    "save_adapter",
    "split_fused_qkv",
    *_LAZY_IMPORTS,
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    require_transformers(f"hf.{name}", extra="eval" if name == "evaluate" else "hf")
    return getattr(import_module(f"qkflow.hf.{_LAZY_IMPORTS[name]}"), name)


def require_transformers(feature: str, *, extra: str = "hf") -> None:
    """Raise if `transformers` is not installed."""
    if find_spec("transformers") is None:
        raise InputError(
            f'{feature} needs transformers: pip install "qkflow[{extra}]"', code="missing-dependency"
        )


if find_spec("transformers") is not None:
    import_module("qkflow.hf.modeling")

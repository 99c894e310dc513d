"""The world of `transformers`: attach couplings to its models, and take ours there.

Importing this registers our architecture with the Auto classes. Attaching needs torch alone; everything
else needs `pip install "qkflow[hf]"`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from qkflow.errors import InputError
from qkflow.hf.adapter_io import load, save
from qkflow.hf.attach import attach, attached, detach, freeze, merge, print_trainable_parameters
from qkflow.hf.attention_functions import register_attention
from qkflow.hf.parameter_roles import param_groups, roles_of
from qkflow.hf.reinit import restart
from qkflow.hf.split_qkv import join_fused, split_fused

# where the parts live that import `transformers`
_HEAVY = {
    "QKFlowConfig": "modeling",
    "QKFlowModel": "modeling",
    "QKFlowForCausalLM": "modeling",
    "QKFlowForSequenceClassification": "modeling",
    "PaceCallback": "trainer",
    "to_transformers": "convert",
    "from_transformers": "convert",
    "to_llama": "convert",
    "from_llama": "convert",
    "open_model": "pretrained",
    "export": "pretrained",
    "import_model": "pretrained",
    "evaluate": "lm_eval",
}

__all__ = [
    "attach",
    "attached",
    "detach",
    "freeze",
    "join_fused",
    "load",
    "merge",
    "param_groups",
    "print_trainable_parameters",
    "register_attention",
    "restart",
    "roles_of",
    "save",
    "split_fused",
    *_HEAVY,
]


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if find_spec("transformers") is None:
        extra = "eval" if name == "evaluate" else "hf"
        raise InputError(f'hf.{name} needs transformers: pip install "qkflow[{extra}]"')
    return getattr(import_module(f"qkflow.hf.{_HEAVY[name]}"), name)


if find_spec("transformers") is not None:
    import_module("qkflow.hf.modeling")

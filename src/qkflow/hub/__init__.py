"""The world of `transformers`: attach couplings to its models, and take ours there.

Importing this registers our architecture with the Auto classes. Attaching needs torch alone; everything
else needs `pip install "qkflow[hub]"`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from qkflow.errors import InputError
from qkflow.hub.adapters import load, save
from qkflow.hub.attach import attach, attached, detach, freeze, merge, print_trainable_parameters
from qkflow.hub.functions import register_attention
from qkflow.hub.restart import restart
from qkflow.pace.groups import param_groups

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
    "open_model": "folders",
    "export": "folders",
    "import_model": "folders",
    "evaluate": "evaluation",
}

__all__ = [
    "attach",
    "attached",
    "detach",
    "freeze",
    "load",
    "merge",
    "param_groups",
    "print_trainable_parameters",
    "register_attention",
    "restart",
    "save",
    *_HEAVY,
]


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    if find_spec("transformers") is None:
        extra = "eval" if name == "evaluate" else "hub"
        raise InputError(f'hub.{name} needs transformers: pip install "qkflow[{extra}]"')
    return getattr(import_module(f"qkflow.hub.{_HEAVY[name]}"), name)


if find_spec("transformers") is not None:
    import_module("qkflow.hub.modeling")

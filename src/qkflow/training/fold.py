"""Fold linear drifts into W_Q during a run: the option `fold_at` of a coupling.

A fold changes the parameters, not the function: W_Q + d·W_K replaces W_Q, and the drift d is zero from then
on. Folding again adds nothing, so that a resumed run folds once more without any state.
"""

from __future__ import annotations

import copy

from torch import nn

from qkflow.attention.attention import Attention, attention_layers
from qkflow.attention.projections import FactorizedQK
from qkflow.errors import InputError


def layers_to_fold(model: nn.Module, *, is_sharded: bool = False) -> list[Attention]:
    """Return the attention layers whose coupling has `fold_at`. Raise InputError if one cannot be folded."""
    layers = [layer for layer in attention_layers(model) if layer.coupling.fold_at > 0]
    if layers and is_sharded:
        raise InputError(
            "fold_at cannot fold sharded weights: use train.parallel ddp instead of fsdp",
            code="fold-sharded-weights",
        )
    for layer in layers:
        try:
            layer.check_mergeable()
        except InputError as error:
            raise InputError(f"fold_at of '{layer.coupling_spec}': {error}", code=error.code) from None
        folded = copy.deepcopy(layer.coupling)
        folded.remove_drift()
        drift = folded.linear_drift()
        if drift is None or drift.any():
            raise InputError(
                f"coupling '{layer.coupling.name}' has a drift after remove_drift(): override it",
                code="drift-remains",
            )
    return layers


def fold_drifts(pending: list[Attention], progress: float) -> bool:
    """Fold every pending layer that is due, and remove it from the list. Return whether any was."""
    due = [layer for layer in pending if layer.coupling.fold_at <= progress]
    for layer in due:
        drift = layer.coupling.linear_drift()
        assert drift is not None
        assert isinstance(layer.qk, FactorizedQK)
        if drift.any():  # adding zero would change the sign of negative zeros
            layer.qk.fold_drift(drift)
        layer.coupling.remove_drift()
        layer.release_prepared()
        pending.remove(layer)
    return bool(due)

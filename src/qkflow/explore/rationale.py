"""The rationale of a classifier: which tokens it points to, and whether its prediction depends on them.

With p the probability of the predicted class ŷ, as in `qkflow.measures.faithfulness`:

    mass               share of the attribution scores on the tokens that the user marked
    comprehensiveness  p(ŷ | text) − p(ŷ | text without its top tokens)
    sufficiency        p(ŷ | text) − p(ŷ | its top tokens only)

Special tokens such as [CLS] are never scored and never deleted: without them the input is no text.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qkflow.errors import InputError, unknown
from qkflow.measures.attribution import ATTRIBUTION_METHODS, Classifier, attribution_scores


@torch.no_grad()
def explain(
    classifier: Classifier,
    ids: Tensor,
    special: list[bool],
    *,
    method: str = "attention",
    percent: float = 20.0,
    marked: list[int] | None = None,
) -> dict[str, Any]:
    """Return scores, mass, comprehensiveness and sufficiency of token ids (T,)."""
    if method not in ATTRIBUTION_METHODS:
        raise unknown("attribution method", method, ATTRIBUTION_METHODS)
    if not 0 < percent <= 100:
        raise InputError(
            f"the share of top tokens must be above 0 and at most 100, not {percent:g}",
            code="invalid-percentage",
        )
    if any(not 0 <= token < len(ids) for token in marked or []):
        raise InputError("a marked token is not in the text", code="unknown-token")
    mask = torch.ones_like(ids, dtype=torch.bool)[None]
    probabilities, attentions = classifier.probabilities_and_attentions(ids[None], mask)
    predicted = probabilities.argmax(-1)
    scores = attribution_scores(classifier, method, ids[None], mask, attentions, predicted, [(0, 0)])[0]
    scores = scores.float().clamp_min(0).masked_fill(torch.tensor(special, device=ids.device), 0)
    share = scores / scores.sum().clamp_min(1e-12)
    content = [index for index, is_special in enumerate(special) if not is_special]
    ranked = sorted(content, key=lambda index: (-float(scores[index]), index))
    top = set(ranked[: max(1, math.ceil(percent / 100 * len(content)))])

    def probability(deleted: set[int]) -> float:
        kept = [index for index in range(len(ids)) if index not in deleted]
        if not kept:
            return 0.0
        return float(classifier.probabilities(ids[None, kept], mask[:, kept])[0, predicted[0]])

    p = float(probabilities[0, predicted[0]])
    return {
        "scores": share.tolist(),
        "top": sorted(top),
        "predicted": int(predicted[0]),
        "probability": p,
        "mass": float(share[marked].sum()) if marked else None,
        "comprehensiveness": p - probability(top),
        "sufficiency": p - probability(set(content) - top),
    }

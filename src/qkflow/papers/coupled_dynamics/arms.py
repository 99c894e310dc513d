"""Names of the arms in the stored studies of couplings, scorings and inits."""

from __future__ import annotations

STUDY = "ingredients"
# Arms of the stored study. Muon and `modern` are the tuned baseline, AdamW and `fan_in` a weak one.
MUON = "{train.lr=0.012,train.optimizer=muon}"
REFERENCE, EULER = f"standard{MUON}", f"euler{MUON}@modern"
WEAK_REFERENCE, WEAK_EULER = "standard{train.lr=0.006}@fan_in", "euler@fan_in"
WEAK_SYMMETRIC = "symmetric@fan_in"
ADAMW_MODERN = "standard{train.lr=0.003}@modern"
WEAK_DRIFT, WEAK_AFFINE = "drift@fan_in", "affine@fan_in"
LEAPFROG, SEVEN_STEPS, UNCOUPLED = "leapfrog@fan_in", "euler:n=7@fan_in", "uncoupled@fan_in"
AFFINE = f"affine{MUON}@modern"
DIFFERENTIAL, AFFINE_DIFFERENTIAL, DIFFERENTIAL_V2, SOFTMAX_NORM = (
    f"{name}{{train.optimizer=muon}}@modern"
    for name in ("differential", "affine+differential", "differential_v2", "softmax_norm")
)
SYMMETRIC, AFFINE_SYMMETRIC = (f"{name}{MUON}@modern+symmetric_score=1" for name in ("standard", "affine"))
# Stored studies of other corpora and budgets: the same arms, with the learning rates of WikiText-2.
FIXED_EULER, FIXED_SYMMETRIC = "euler{train.lr=0.006}@fan_in", f"{WEAK_REFERENCE}+symmetric=1"
FIXED_DIFFERENTIAL = "differential{train.lr=0.006,train.optimizer=muon}@modern"
INCREASING_PACE = "standard{train.lr=0.012,train.optimizer=muon,train.pace=increasing:4}@modern"
# The same with a plain feed-forward of as many parameters; without the optimizer's keys in its own study.
PLAIN_FFN = "model.feed_forward=gelu,model.hidden_dim=512"
PLAIN_REFERENCE, PLAIN_EULER, PLAIN_DIFFERENTIAL = (
    f"{name}{{{PLAIN_FFN},train.lr=0.012,train.optimizer=muon}}@modern"
    for name in ("standard", "euler", "differential")
)
TUNED_PLAIN_REFERENCE, TUNED_PLAIN_EULER = (f"{name}{{{PLAIN_FFN}}}" for name in ("standard", "euler"))
TUNED_PLAIN_DIFFERENTIAL = f"differential{{{PLAIN_FFN},train.lr=0.012}}"
# Stored studies of pace, in which every arm has the reference's init and optimizer.
TUNED_STUDY, TUNED_REFERENCE, TUNED_PACE = "tuned-baseline", "standard", "standard{train.pace=increasing:4}"
# Stored study of the symmetric init and of shorter steps, from fan_in with one rate.
CONTROLS_STUDY = "symmetric-controls"
SEVEN_SHORT_STEPS = "euler:n=7:step=0.0143{train.lr=0.006}@fan_in"

"""The stationary distribution of a master equation ẋ = W x, found four ways, or an explanation why not.

A generator W holds rates: W_ij ≥ 0 is the rate from state j to state i, and every column sums to zero
(1ᵀW = 0), so that probability is kept. If every state can reach every other (W is irreducible), there is
exactly one distribution with W p = 0 and 1ᵀp = 1. Each solver below is one way to write that down:

    bordered      (W − 11ᵀ) p = −1                     both conditions in one regular system
    replaced_row  W with its last row replaced by 1ᵀ    W p = 0 has one row too many; p solves W' p = e_n
    cofactors     p_i ∝ |det of W without row and column i|     (the Markov chain tree theorem)
    null_vector   the right singular vector of the zero singular value
    gth           elimination without a single subtraction: the reference the others are measured against
                  (Grassmann, Taksar & Heyman, Operations Research 33(5), 1985)

All take (..., N, N) and return (..., N) in float64, and gradients flow through every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qkflow.errors import InputError, unknown

COLUMN_TOLERANCE = 1e-9  # relative to the fastest rate: a file written with 10 digits passes
MAX_CONDITION = torch.finfo(torch.float64).eps ** -0.5  # beyond it a solve keeps less than half its digits


def random_generator(n_states: int, batch: Sequence[int] = (), seed: int = 0) -> Tensor:
    """Dense generators (*batch, N, N) with log-normal rates: irreducible, over about two decades."""
    if n_states < 2:
        raise InputError(f"a generator needs at least 2 states, not {n_states}")
    source = torch.Generator().manual_seed(seed)
    return generator_from_rates(
        torch.randn(*batch, n_states, n_states, generator=source, dtype=torch.float64).exp()
    )


def generator_from_rates(rates: Tensor) -> Tensor:
    """The generator with these off-diagonal rates: the diagonal is set so that columns sum to zero."""
    rates = rates - torch.diag_embed(rates.diagonal(dim1=-2, dim2=-1))
    return rates - torch.diag_embed(rates.sum(-2))


def load_generator(path: str | Path) -> Tensor:
    """Read a matrix (or, from JSON and NPY, a batch of them) from a .csv, .json or .npy file."""
    path = Path(path)
    readers: dict[str, Callable[[Path], object]] = {".csv": _read_csv, ".json": _read_json, ".npy": _read_npy}
    if path.suffix.lower() not in readers:
        raise unknown("kind of generator file", path.suffix or path.name, readers)
    if not path.is_file():
        raise InputError(f"no generator file at {path}")
    try:
        return torch.as_tensor(readers[path.suffix.lower()](path), dtype=torch.float64)
    except (ValueError, TypeError, OverflowError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} does not hold a matrix of numbers: {error}") from error


def _read_csv(path: Path) -> object:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [[float(cell) for cell in line.split(",")] for line in lines if line.strip()]


def _read_json(path: Path) -> object:
    value = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(value, dict) and "generator" not in value:
        raise ValueError("an object needs the key 'generator'")
    return value["generator"] if isinstance(value, dict) else value


def _read_npy(path: Path) -> object:
    import numpy as np

    values = np.load(path, allow_pickle=False)
    if np.iscomplexobj(values):
        raise ValueError("its entries are complex, and rates are real")
    return values


def check_generator(W: Tensor, max_condition: float = MAX_CONDITION) -> Tensor:
    """W as a float64 generator with one well-determined stationary distribution; else an `InputError`.

    Columns may miss zero by rounding; the diagonal is then set again from the rates, since every solver
    should be given the same problem. `max_condition=inf` admits any irreducible generator.
    """
    rounding = torch.finfo(W.dtype).eps if W.is_floating_point() else 0.0
    W = W.to(torch.float64)
    _check_entries(W, rounding)
    W = generator_from_rates(W)
    _check_irreducible(W)
    condition = condition_number(W)
    worst = int(condition.argmax())
    # `not ≤` rather than `>`: a condition number that overflowed to nan is refused too
    if not bool((condition <= max_condition).all()):
        raise InputError(_explain_condition(W, worst, float(condition.flatten()[worst])))
    return W


def condition_number(W: Tensor) -> Tensor:
    """Condition (...,) of W − 11ᵀ after scaling the fastest rate to 1, which does not change p."""
    return torch.linalg.cond(_bordered_matrix(W))


def stationary_distribution(W: Tensor, method: str = "gth", check: bool = True) -> Tensor:
    """The stationary distribution (..., N) of each generator of W (..., N, N).

    `gth` is exact to rounding however slow some rates are; the other methods lose digits with the condition
    number, so they refuse an ill-conditioned W. `check=False` skips every check, for generators known good.
    """
    if method not in SOLVERS:
        raise unknown("solver", method, SOLVERS)
    if check:
        W = check_generator(W, max_condition=float("inf") if method == "gth" else MAX_CONDITION)
    return SOLVERS[method](W.to(torch.float64))


def bordered(W: Tensor) -> Tensor:
    return torch.linalg.solve(_bordered_matrix(W), -torch.ones_like(W[..., 0]))


def replaced_row(W: Tensor) -> Tensor:
    ones = torch.ones_like(W[..., :1, :])
    last = torch.zeros_like(W[..., 0])
    last[..., -1] = 1
    return torch.linalg.solve(torch.cat([_scaled(W)[..., :-1, :], ones], -2), last)


def cofactors(W: Tensor) -> Tensor:
    """Every principal minor of −W is positive, so logarithms of determinants carry all there is to know."""
    states = torch.arange(W.shape[-1], device=W.device)
    scaled = _scaled(W)
    logs = []
    for i in states:  # one minor at a time: all of them together are N times the size of W
        others = states[states != i]
        logs.append(torch.linalg.slogdet(scaled[..., others[:, None], others]).logabsdet)
    return torch.softmax(torch.stack(logs, -1), -1)


def null_vector(W: Tensor) -> Tensor:
    vector = torch.linalg.svd(_scaled(W)).Vh[..., -1, :]
    return vector / vector.sum(-1, keepdim=True)


def gth(W: Tensor) -> Tensor:
    """Remove the last state again and again, rerouting its flow; then put the states back in turn."""
    rates = W.mT  # from row to column, as the paper has it; the diagonal is never read
    inflows = []
    for k in range(W.shape[-1] - 1, 0, -1):
        outflow = rates[..., k, :k]
        inflow = rates[..., :k, k] / outflow.sum(-1, keepdim=True)
        inflows.append(inflow)
        rates = rates[..., :k, :k] + inflow[..., :, None] * outflow[..., None, :]
    p = torch.ones_like(W[..., 0, :1])
    for inflow in reversed(inflows):
        p = torch.cat([p, (p * inflow).sum(-1, keepdim=True)], -1)
        p = p / p.sum(-1, keepdim=True)  # now, not at the end: ratios of many states can overflow
    return p


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bordered": bordered,
    "replaced_row": replaced_row,
    "cofactors": cofactors,
    "null_vector": null_vector,
    "gth": gth,
}


def solver_disagreement(W: Tensor) -> dict[str, float]:
    """Largest L1 distance of each solver from `gth`, and of any two solvers, over a batch of generators."""
    solutions = {name: solve(W) for name, solve in SOLVERS.items()}
    stacked = torch.stack(list(solutions.values()))
    distances = {
        name: float((p - solutions["gth"]).abs().sum(-1).max())
        for name, p in solutions.items()
        if name != "gth"
    }
    return {**distances, "any_two": float((stacked[:, None] - stacked[None]).abs().sum(-1).max())}


def _scaled(W: Tensor) -> Tensor:
    return W / W.abs().amax((-2, -1), keepdim=True)


def _bordered_matrix(W: Tensor) -> Tensor:
    return _scaled(W) - 1.0  # 11ᵀ is a matrix of ones


def _name_generator(index: int, batch: Sequence[int]) -> str:
    """How to name one generator: nothing to add when it is the only one."""
    if not batch:
        return "the generator"
    place = [int(i) for i in torch.unravel_index(torch.tensor(index), tuple(batch))]
    return f"generator {place[0] if len(place) == 1 else place} of the batch"


def _check_entries(W: Tensor, rounding: float) -> None:
    if W.ndim < 2 or W.shape[-1] != W.shape[-2]:
        raise InputError(f"a generator is a square matrix, not one of shape {tuple(W.shape)}")
    if W.shape[-1] < 2 or W.numel() == 0:
        raise InputError(
            f"a generator needs at least 2 states, and a batch at least one of it: {tuple(W.shape)}"
        )
    if not bool(W.isfinite().all()):
        raise InputError("the generator holds nan or infinite entries: every rate must be a finite number")
    batch, N = W.shape[:-2], W.shape[-1]
    tolerance = max(COLUMN_TOLERANCE, N * rounding)
    flat = W.reshape(-1, N, N)
    negative = (flat - torch.diag_embed(flat.diagonal(dim1=-2, dim2=-1)) < 0).nonzero()
    if len(negative):
        b, i, j = negative[0].tolist()
        raise InputError(
            f"{_name_generator(b, batch)} has the negative rate {flat[b, i, j]:.6g} from state {j} to state {i} "
            f"(row {i}, column {j}): off-diagonal entries must be zero or positive"
        )
    scale = flat.abs().amax((-2, -1))
    wrong = (flat.sum(-2).abs() > tolerance * scale[:, None]).nonzero()
    if len(wrong):
        b, j = wrong[0].tolist()
        rows_do = bool((flat[b].sum(-1).abs() <= tolerance * scale[b]).all())
        advice = (
            "its rows do sum to zero, so transpose it (entry i,j is the rate from j to i)"
            if rows_do
            else "set each diagonal entry to minus the sum of the other entries of its column"
        )
        raise InputError(
            f"{_name_generator(b, batch)}: column {j} sums to {flat[b, :, j].sum():.6g}, not to zero; {advice}"
        )


def _transitive_closure(adjacency: Tensor) -> Tensor:
    """Transitive closure (..., N, N) of a graph by repeated squaring; entry i,j: i can be reached from j."""
    N = adjacency.shape[-1]
    reach = (adjacency | torch.eye(N, dtype=torch.bool, device=adjacency.device)).float()
    for _ in range(max(1, (N - 1).bit_length())):
        reach = (reach @ reach > 0).float()
    return reach > 0


def communicating_classes(W: Tensor) -> list[tuple[list[int], bool]]:
    """The classes of states that reach each other in one generator (N, N), and whether each is closed."""
    reach = _transitive_closure(W > 0)
    mutual = reach & reach.mT
    first = mutual.float().argmax(-1)  # the lowest state of each state's class
    classes = []
    for root in first.unique().tolist():
        members = mutual[root]
        classes.append((members.nonzero()[:, 0].tolist(), bool((reach[:, root] == members).all())))
    return classes


def _format_states(states: Sequence[int]) -> str:
    shown = ", ".join(str(s) for s in states[:8])
    return "{" + shown + (f", … {len(states)} states" if len(states) > 8 else "") + "}"


def _format_state_sets(sets: Sequence[Sequence[int]]) -> str:
    shown = ", ".join(_format_states(s) for s in sets[:4])
    return shown + (f" and {len(sets) - 4} more" if len(sets) > 4 else "")


def _check_irreducible(W: Tensor) -> None:
    N = W.shape[-1]
    reducible = (~_transitive_closure(W > 0)).flatten(-2).any(-1).flatten().nonzero()
    if not len(reducible):
        return
    b = int(reducible[0])
    classes = communicating_classes(W.reshape(-1, N, N)[b])
    closed = [states for states, is_closed in classes if is_closed]
    name = _name_generator(b, W.shape[:-2])
    if len(closed) > 1:
        raise InputError(
            f"{name} is reducible: it has {len(closed)} closed classes of states, {_format_state_sets(closed)}, "
            "each with a stationary distribution of its own, so none is singled out; "
            "connect them, or solve each alone"
        )
    passing = sorted(state for states, is_closed in classes if not is_closed for state in states)
    raise InputError(
        f"{name} is reducible: the states {_format_states(passing)} drain into {_format_state_sets(closed)} and are never "
        "re-entered, so their stationary probability is zero; leave them out or add the missing rates"
    )


def _explain_condition(W: Tensor, index: int, condition: float) -> str:
    """Say which groups of states hardly exchange: those apart once the slowest rates are dropped."""
    N = W.shape[-1]
    one = W.reshape(-1, N, N)[index]
    cut = float(one.abs().max()) / MAX_CONDITION
    groups = [states for states, _ in communicating_classes(torch.where(one >= cut, one, 0.0))]
    reason = (
        f"without rates below {cut:.2g} it falls into {len(groups)} parts, {_format_state_sets(groups)}"
        if len(groups) > 1
        else "its rates multiply up to very different time scales"
    )
    digits = max(0.0, -torch.tensor(condition * torch.finfo(torch.float64).eps).log10().item())
    return (
        f"{_name_generator(index, W.shape[:-2])} is ill-conditioned (condition number {condition:.1e}: about "
        f"{digits:.0f} of 16 digits would be right): {reason}; rescale the slow rates, or solve with "
        "method 'gth', which loses no digits if the rates themselves are exact"
    )

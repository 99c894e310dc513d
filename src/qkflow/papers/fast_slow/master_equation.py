"""Stationary distribution of a master equation ẋ = W x, by five solvers.

A generator W has rates W_ij ≥ 0 from state j to state i, and columns that sum to zero (1ᵀW = 0), which
conserves probability. If W is irreducible (every state reaches every other), exactly one distribution has
W p = 0 and 1ᵀp = 1.

    bordered      (W − 11ᵀ) p = −1                  both conditions in one regular system
    replaced_row  W' p = e_N                        W' is W with its last, redundant row replaced by 1ᵀ
    cofactors     p_i ∝ |det of W without row and column i|    (Markov chain tree theorem)
    null_vector   the right singular vector of the zero singular value
    gth           elimination without subtractions, the reference for the others
                  (Grassmann, Taksar & Heyman, Operations Research 33(5), 1985)

All map (..., N, N) to (..., N) in float64 and are differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tokenize import TokenError  # of the header of an .npy file

import torch
from torch import Tensor

from qkflow.errors import InputError, join_limited, unknown
from qkflow.plain_data import read_json, read_text

COLUMN_TOLERANCE = 1e-9  # relative to the largest rate; accepts files written with 10 digits
MAX_CONDITION = torch.finfo(torch.float64).eps ** -0.5  # beyond it, a solve loses more than half the digits


def random_generator(n_states: int, batch: Sequence[int] = (), seed: int = 0) -> Tensor:
    """Return dense, irreducible generators (*batch, N, N) with log-normal rates."""
    if n_states < 2:
        raise InputError(f"a generator needs at least 2 states, not {n_states}", code="too-few-states")
    rng = torch.Generator().manual_seed(seed)
    return generator_from_rates(
        torch.randn(*batch, n_states, n_states, generator=rng, dtype=torch.float64).exp()
    )


def generator_from_rates(rates: Tensor) -> Tensor:
    """Return the generator with these off-diagonal rates; the diagonal makes columns sum to zero."""
    rates = rates - torch.diag_embed(rates.diagonal(dim1=-2, dim2=-1))
    return rates - torch.diag_embed(rates.sum(-2))


def load_generator(path: str | Path) -> Tensor:
    """Read a matrix from a .csv, .json or .npy file; JSON and NPY may hold a batch (..., N, N)."""
    path = Path(path)
    readers: dict[str, Callable[[Path], object]] = {".csv": _read_csv, ".json": _read_json, ".npy": _read_npy}
    if path.suffix.lower() not in readers:
        raise unknown("generator file format", path.suffix or path.name, readers)
    if not path.is_file():
        raise InputError(f"generator file not found: {path}", code="generator-file-not-found")
    try:
        return torch.as_tensor(readers[path.suffix.lower()](path), dtype=torch.float64)
    except (ValueError, TypeError, OverflowError, RuntimeError, EOFError, SyntaxError, TokenError) as error:
        raise InputError(
            f"{path} does not contain a matrix of numbers: {error}", code="corrupt-generator-file"
        ) from error


def _read_csv(path: Path) -> object:
    lines = read_text(path).splitlines()
    return [[float(cell) for cell in line.split(",")] for line in lines if line.strip()]


def _read_json(path: Path) -> object:
    value = read_json(path)
    if isinstance(value, dict) and "generator" not in value:
        raise ValueError("an object needs the key 'generator'")
    return value["generator"] if isinstance(value, dict) else value


def _read_npy(path: Path) -> object:
    import numpy as np

    with open(path, "rb") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)  # unlike np.load it opens no archives
    if np.iscomplexobj(values):
        raise ValueError("its entries are complex; rates must be real")
    return values


def check_generator(W: Tensor, max_condition: float = MAX_CONDITION) -> Tensor:
    """Return W (..., N, N) in float64, or raise if it is no well-conditioned irreducible generator.

    The diagonal is recomputed from the rates, so that rounding in the column sums affects no solver.
    `max_condition=inf` accepts every irreducible generator.
    """
    rounding = torch.finfo(W.dtype).eps if W.is_floating_point() else 0.0
    W = W.to(torch.float64)
    _check_entries(W, rounding)
    W = generator_from_rates(W)
    _check_irreducible(W)
    condition = condition_number(W)
    worst = int(condition.argmax())
    # `not <=` also rejects NaN, a condition number that overflowed
    if not bool((condition <= max_condition).all()):
        raise InputError(
            _explain_condition(W, worst, float(condition.flatten()[worst])), code="ill-conditioned-generator"
        )
    return W


def condition_number(W: Tensor) -> Tensor:
    """Return the condition number (...) of W − 11ᵀ, with W scaled to a largest rate of 1."""
    return torch.linalg.cond(_bordered_matrix(W))


def stationary_distribution(W: Tensor, method: str = "gth", check: bool = True) -> Tensor:
    """Return the stationary distribution (..., N) of each generator W (..., N, N).

    `gth` is accurate to rounding for any ratio of rates. The other methods lose digits with the condition
    number, so they raise for an ill-conditioned W. `check=False` skips all checks.
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
    """Softmax of the log-determinants of the principal minors; all minors of −W are positive."""
    states = torch.arange(W.shape[-1], device=W.device)
    scaled = _scaled(W)
    logs = []
    for i in states:  # one at a time: all minors together need N times the memory of W
        others = states[states != i]
        logs.append(torch.linalg.slogdet(scaled[..., others[:, None], others]).logabsdet)
    return torch.softmax(torch.stack(logs, -1), -1)


def null_vector(W: Tensor) -> Tensor:
    vector = torch.linalg.svd(_scaled(W)).Vh[..., -1, :]
    return vector / vector.sum(-1, keepdim=True)


def gth(W: Tensor) -> Tensor:
    """Eliminate the last state and reroute its flow until one is left, then substitute back."""
    rates = W.mT  # from row to column, as in the paper; the diagonal is not used
    inflows = []
    for k in range(W.shape[-1] - 1, 0, -1):
        outflow = rates[..., k, :k]
        inflow = rates[..., :k, k] / outflow.sum(-1, keepdim=True)
        inflows.append(inflow)
        rates = rates[..., :k, :k] + inflow[..., :, None] * outflow[..., None, :]
    p = torch.ones_like(W[..., 0, :1])
    for inflow in reversed(inflows):
        p = torch.cat([p, (p * inflow).sum(-1, keepdim=True)], -1)
        p = p / p.sum(-1, keepdim=True)  # in every step, because unnormalized ratios can overflow
    return p


SOLVERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bordered": bordered,
    "replaced_row": replaced_row,
    "cofactors": cofactors,
    "null_vector": null_vector,
    "gth": gth,
}


def solver_disagreement(W: Tensor) -> dict[str, float]:
    """Return the largest L1 distance of each solver from `gth`, and between any two, over a batch."""
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
    """Name a generator in an error message by its index in the batch."""
    if not batch:
        return "the generator"
    indices = [int(i) for i in torch.unravel_index(torch.tensor(index), tuple(batch))]
    return f"generator {indices[0] if len(indices) == 1 else indices} of the batch"


def _check_entries(W: Tensor, rounding: float) -> None:
    if W.ndim < 2 or W.shape[-1] != W.shape[-2]:
        raise InputError(
            f"a generator must be a square matrix (..., N, N), not of shape {tuple(W.shape)}",
            code="generator-not-square",
        )
    if W.shape[-1] < 2 or W.numel() == 0:
        raise InputError(
            f"a generator needs at least 2 states and a batch at least one generator, not {tuple(W.shape)}",
            code="too-few-states",
        )
    if not bool(W.isfinite().all()):
        raise InputError(
            "the generator has NaN or infinite entries: every rate must be finite", code="non-finite-rate"
        )
    batch, N = W.shape[:-2], W.shape[-1]
    tolerance = max(COLUMN_TOLERANCE, N * rounding)
    flat = W.reshape(-1, N, N)
    negative = (flat - torch.diag_embed(flat.diagonal(dim1=-2, dim2=-1)) < 0).nonzero()
    if len(negative):
        b, i, j = negative[0].tolist()
        raise InputError(
            f"{_name_generator(b, batch)} has the negative rate {flat[b, i, j]:.6g} from state {j} to "
            f"state {i} (row {i}, column {j}): off-diagonal entries must not be negative",
            code="negative-rate",
        )
    scale = flat.abs().amax((-2, -1))
    nonzero = (flat.sum(-2).abs() > tolerance * scale[:, None]).nonzero()
    if len(nonzero):
        b, j = nonzero[0].tolist()
        rows_sum_to_zero = bool((flat[b].sum(-1).abs() <= tolerance * scale[b]).all())
        advice = (
            "its rows do, so transpose it (entry i,j is the rate from j to i)"
            if rows_sum_to_zero
            else "set each diagonal entry to minus the sum of the other entries of its column"
        )
        raise InputError(
            f"{_name_generator(b, batch)}: column {j} sums to {flat[b, :, j].sum():.6g}, not to zero; "
            f"{advice}",
            code="column-sum-not-zero",
        )


def _transitive_closure(adjacency: Tensor) -> Tensor:
    """Return the transitive closure (..., N, N) by repeated squaring; entry i,j: i is reachable from j."""
    N = adjacency.shape[-1]
    reach = (adjacency | torch.eye(N, dtype=torch.bool, device=adjacency.device)).float()
    for _ in range(max(1, (N - 1).bit_length())):
        reach = (reach @ reach > 0).float()
    return reach > 0


def communicating_classes(W: Tensor) -> list[tuple[list[int], bool]]:
    """Return the communicating classes of one generator (N, N) as (states, is_closed)."""
    reach = _transitive_closure(W > 0)
    mutual = reach & reach.mT
    first = mutual.float().argmax(-1)  # the lowest state of each class
    classes = []
    for root in first.unique().tolist():
        members = mutual[root]
        classes.append((members.nonzero()[:, 0].tolist(), bool((reach[:, root] == members).all())))
    return classes


def _format_states(states: Sequence[int]) -> str:
    shown = ", ".join(str(s) for s in states[:8])
    return "{" + shown + (f", … {len(states)} states" if len(states) > 8 else "") + "}"


def _format_state_sets(sets: Sequence[Sequence[int]]) -> str:
    return join_limited([_format_states(states) for states in sets], 4)


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
            f"{name} is reducible: it has {len(closed)} closed classes of states, "
            f"{_format_state_sets(closed)}, each with its own stationary distribution; connect them, or "
            "solve each separately",
            code="reducible-generator",
        )
    transient = sorted(state for states, is_closed in classes if not is_closed for state in states)
    raise InputError(
        f"{name} is reducible: the states {_format_states(transient)} are transient (they drain into "
        f"{_format_state_sets(closed)}), so their stationary probability is zero; remove them, or add "
        "rates back to them",
        code="reducible-generator",
    )


def _explain_condition(W: Tensor, index: int, condition: float) -> str:
    """Describe the groups of states that are connected by the slowest rates only."""
    N = W.shape[-1]
    generator = W.reshape(-1, N, N)[index]
    cut = float(generator.abs().max()) / MAX_CONDITION
    groups = [states for states, _ in communicating_classes(torch.where(generator >= cut, generator, 0.0))]
    reason = (
        f"without rates below {cut:.2g} it has {len(groups)} separate parts, {_format_state_sets(groups)}"
        if len(groups) > 1
        else "its rates combine to very different time scales"
    )
    digits = max(0.0, -torch.tensor(condition * torch.finfo(torch.float64).eps).log10().item())
    return (
        f"{_name_generator(index, W.shape[:-2])} is ill-conditioned (condition number {condition:.1e}: about "
        f"{digits:.0f} of 16 digits would be correct): {reason}; rescale the slow rates, or use method "
        "'gth', which is accurate for any ratio of rates"
    )

"""`qkflow timescale theory`: the mathematics behind the slow path, checked on random or given generators."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from qkflow import console
from qkflow.config_io import check_seed
from qkflow.errors import InputError
from qkflow.files import write_atomic
from qkflow.papers.fast_slow import convergence, variational
from qkflow.papers.fast_slow import master_equation as master

MAX_SOLVER_GENERATORS = (
    256  # generators the solvers are compared on, fewer where COMPARED·N⁴ is more than COMPARED_WORK
)
MAX_SOLVER_OPS = 1e9  # `cofactors` takes N determinants of N³ operations each


def theory(
    generator: Path | None = None,
    states: int | None = None,
    seed: int = 0,
    drift: float = 0.05,
    steps: int | None = None,
    hidden_dim: int = 32,
    out: Path | None = None,
    quick: bool = False,
    json: bool = False,
) -> None:
    """Check the fast-slow limit ε·ẋ = W(y)x: its equilibrium, the O(ε) approach to it, and φ_θ learnt for it.

    Three things are measured. The stationary distribution W p = 0 is solved four ways, which must agree to
    rounding. The system is integrated for ε = 1/2 … 1/64, and the distance sup‖x − p_st(y)‖₁ must halve
    with ε (fitted order 1). A softmax network φ_θ(y) is trained on E‖W(y)φ_θ(y)‖² alone and compared with
    the exact p_st(y).

    For example:
        qkflow timescale theory
        qkflow timescale theory --states 12 --seed 3 --out theory.html
        qkflow timescale theory --generator rates.csv --json

    Args:
        generator: a file with the matrix W (.csv, .json or .npy): entry i,j is the rate from state j to i,
            columns sum to zero. Of a batch of matrices the solvers take all and the rest takes the first.
        states: size of a random generator instead (6 unless given).
        seed: decides the random generator, how it drifts with y, and the start of φ.
        drift: speed ω of the slow variable, in units of the slowest relaxation rate; order 1 needs it well
            below 1.
        steps: training steps of φ (2000, or 300 with --quick).
        hidden: width of φ's two hidden layers.
        out: write an HTML page with a plot of each result, which opens offline.
        quick: a coarser integration, fewer generators and training steps.
        json: print one JSON object instead of tables.
    """
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder: name the HTML file to write")
    if steps is None:
        steps = 300 if quick else 2000
    for flag, value in (("--drift", drift), ("--steps", steps), ("--hidden", hidden_dim)):
        if not 0 < value < math.inf:
            raise InputError(f"{flag} must be a positive number, not {value:g}")
    check_seed("--seed", seed)
    W = _load_generators(generator, states, seed)
    drifting = convergence.DriftingGenerator(W.flatten(0, -3)[0] if W.ndim > 2 else W, seed)
    compared = _solver_test_generators(W, drifting, is_given=generator is not None, quick=quick, seed=seed)
    solvers = master.solver_disagreement(compared)
    measured, fit = _run_experiments(drifting, drift, steps, hidden_dim, seed, quick)
    result = {
        "generator": str(generator) if generator else "random",
        "states": drifting.n_states,
        "seed": seed,
        "drift": drift,
        "condition": float(master.condition_number(W).max()),
        "stationary": master.stationary_distribution(W).tolist(),
        "solvers": {"generators": len(compared), **solvers},
        "epsilons": list(measured.errors),
        "errors": list(measured.errors.values()),
        "predicted_error_per_epsilon": measured.predicted_error_per_epsilon,
        "order": measured.order,
        "kl": {"steps": fit.steps, "mean": fit.kl_mean, "max": fit.kl_max},
        "residual": fit.residuals,
    }
    if out is not None:
        from qkflow.papers.fast_slow.theory_page import render_page

        write_atomic(out, render_page(result, drifting, measured, fit))
    if json:
        console.emit_json(result)
    else:
        _print_results(result)
        if out is not None:
            console.out.print(f"plots: {out}", markup=False, soft_wrap=True, highlight=False)


def _load_generators(path: Path | None, states: int | None, seed: int) -> Tensor:
    if path is None:
        return master.random_generator(6 if states is None else states, seed=seed)
    if states is not None:
        raise InputError("--states is the size of a random generator: leave it out with --generator")
    return master.check_generator(master.load_generator(path))


def _solver_test_generators(
    W: Tensor, drifting: convergence.DriftingGenerator, is_given: bool, quick: bool, seed: int
) -> Tensor:
    """What the solvers are compared on: given generators or random ones, and the drifting one on its way."""
    N = drifting.n_states
    count = max(2, min(32 if quick else MAX_SOLVER_GENERATORS, int(MAX_SOLVER_OPS / N**4)))
    along = drifting.at(convergence.circle_angles(count // 2))
    others = W.reshape(-1, N, N) if is_given else master.random_generator(N, (count // 2,), seed)
    return torch.cat([others, along])


def _run_experiments(
    drifting: convergence.DriftingGenerator, drift: float, steps: int, hidden_dim: int, seed: int, quick: bool
) -> tuple[convergence.Convergence, variational.FitResult]:
    with console.progress_bar() as progress:
        paths = progress.add_task("integrating ε = 1/2 … 1/64", total=len(convergence.EPSILONS))
        training = progress.add_task("training φ", total=steps, start=False)
        measured = convergence.measure_convergence(
            drifting, drift, min_steps=100 if quick else 200, callback=lambda path: progress.advance(paths)
        )
        progress.start_task(training)
        fit = variational.fit_stationary_net(
            drifting,
            steps,
            hidden_dim,
            seed=seed,
            callback=lambda step, kl: progress.update(
                training, completed=step, description=f"training φ, KL {kl:.1e}"
            ),
        )
    return measured, fit


def _print_results(result: dict[str, Any]) -> None:
    solvers = dict(result["solvers"])
    compared, any_two = solvers.pop("generators"), solvers.pop("any_two")
    table = Table(title=f"W p = 0, {compared} generators of {result['states']} states", title_justify="left")
    table.add_column("solver")
    table.add_column("largest L1 distance from gth", justify="right")
    for name, distance in solvers.items():
        table.add_row(name, f"{distance:.1e}")
    table.add_row("any two", f"{any_two:.1e}")
    console.out.print(table)

    table = Table(title=f"ε·ẋ = W(y)x, drift {result['drift']:g}", title_justify="left")
    for heading in ("ε", "sup ‖x − p_st(y)‖₁", "error / ε", "before / this"):
        table.add_column(heading, justify="right")
    before = None
    for epsilon, error in zip(result["epsilons"], result["errors"], strict=True):
        shrunk = f"{before / error:.3f}" if before else ""
        table.add_row(f"1/{1 / epsilon:g}", f"{error:.6f}", f"{error / epsilon:.6f}", shrunk)
        before = error
    table.add_row("→ 0", "", f"{result['predicted_error_per_epsilon']:.6f}", "", style="dim")
    console.out.print(table)
    console.out.print(f"fitted order {result['order']:.4f} (theory: 1; last row: predicted in closed form)\n")

    kl = result["kl"]
    table = Table(title="φ_θ(y), trained on E‖W(y)φ(y)‖² alone", title_justify="left")
    for heading in ("step", "E‖Wφ‖²", "mean KL(p_st‖φ)", "largest KL"):
        table.add_column(heading, justify="right")
    last = len(kl["steps"]) - 1
    for i in sorted({0, last // 20, last // 4, last // 2, last}):
        numbers = (result["residual"][i], kl["mean"][i], kl["max"][i])
        table.add_row(str(kl["steps"][i]), *(f"{number:.1e}" for number in numbers))
    console.out.print(table)

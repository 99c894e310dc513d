"""`qkflow timescale theory`: numerical checks of the fast-slow limit behind the slow path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
from rich.table import Table
from torch import Tensor

from qkflow import console
from qkflow.config_io import Count, Positive, Range, Seed
from qkflow.errors import InputError
from qkflow.files import write_atomic
from qkflow.papers.fast_slow import convergence, variational
from qkflow.papers.fast_slow import master_equation as master

# The solvers are compared on at most this many generators of N states, and on fewer for large N:
MAX_SOLVER_GENERATORS = 256
MAX_SOLVER_OPS = 1e9  # `cofactors` computes N determinants of N³ operations per generator


def theory(
    generator: Path | None = None,
    states: Annotated[int, Range(high=10**4)] | None = None,
    seed: Seed = 0,
    drift: Positive = 0.05,
    steps: Count | None = None,
    hidden_dim: Annotated[int, Range(1, 10**5)] = 32,
    out: Path | None = None,
    quick: bool = False,
    json: bool = False,
) -> None:
    """Check the fast-slow limit ε·ẋ = W(y)x: stationary distribution, order in ε, learned φ_θ.

    The stationary distribution W p = 0 is computed by five solvers, which must agree to rounding. The system
    is integrated for ε = 1/2 … 1/64; the distance sup‖x − p_st(y)‖₁ must halve with ε (fitted order 1). A
    softmax network φ_θ(y) is trained on E‖W(y)φ_θ(y)‖² only and compared with the exact p_st(y).

    examples:
      qkflow timescale theory
      qkflow timescale theory --states 12 --seed 3 --out theory.html
      qkflow timescale theory --generator rates.csv --json

    Args:
        generator: file with the matrix W (.csv, .json or .npy): entry i,j is the rate from state j to i, and
            columns sum to zero. Of a batch, the solvers use all matrices, the other checks the first.
        states: number of states of a random generator (default: 6).
        seed: seed of the random generator, of its dependence on y, and of the init of φ.
        drift: speed ω of the slow variable, in units of the slowest relaxation rate; order 1 needs ω ≪ 1.
        steps: training steps of φ (default: 2000, with --quick 300).
        hidden_dim: size of the two hidden layers of φ.
        out: write an HTML page with a figure of each result.
        quick: coarser integration, fewer generators and training steps.
        json: print one JSON object instead of tables.
    """
    if out is not None and out.is_dir():
        raise InputError(f"--out {out} is a folder: pass the path of an HTML file", code="out-is-a-folder")
    if steps is None:
        steps = 300 if quick else 2000
    W = _load_generators(generator, states, seed)
    drifting = convergence.DriftingGenerator(W.flatten(0, -3)[0] if W.ndim > 2 else W, seed)
    generators = _solver_test_generators(W, drifting, from_file=generator is not None, quick=quick, seed=seed)
    solvers = master.solver_disagreement(generators)
    measured, fit = _run_experiments(drifting, drift, steps, hidden_dim, seed, quick)
    result = {
        "generator": str(generator) if generator else "random",
        "states": drifting.n_states,
        "seed": seed,
        "drift": drift,
        "condition": float(master.condition_number(W).max()),
        "stationary": master.stationary_distribution(W).tolist(),
        "solvers": {"generators": len(generators), **solvers},
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
            console.out.print(f"figures: {out}", markup=False, soft_wrap=True, highlight=False)


def _load_generators(path: Path | None, states: int | None, seed: int) -> Tensor:
    if path is None:
        return master.random_generator(6 if states is None else states, seed=seed)
    if states is not None:
        raise InputError(
            "--states is for random generators: remove it, or remove --generator", code="conflicting-options"
        )
    return master.check_generator(master.load_generator(path))


def _solver_test_generators(
    W: Tensor, drifting: convergence.DriftingGenerator, from_file: bool, quick: bool, seed: int
) -> Tensor:
    """Return generators (M, N, N): those of the file or random ones, and W(y) on the circle."""
    N = drifting.n_states
    count = max(2, min(32 if quick else MAX_SOLVER_GENERATORS, int(MAX_SOLVER_OPS / N**4)))
    on_circle = drifting.at(convergence.circle_angles(count // 2))
    others = W.reshape(-1, N, N) if from_file else master.random_generator(N, (count // 2,), seed)
    return torch.cat([others, on_circle])


def _run_experiments(
    drifting: convergence.DriftingGenerator, drift: float, steps: int, hidden_dim: int, seed: int, quick: bool
) -> tuple[convergence.Convergence, variational.FitResult]:
    with console.progress_bar() as progress:
        integration = progress.add_task("integrating ε = 1/2 … 1/64", total=len(convergence.EPSILONS))
        training = progress.add_task("training φ", total=steps, start=False)
        measured = convergence.measure_convergence(
            drifting, drift, min_steps=100 if quick else 200, callback=lambda _: progress.advance(integration)
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
    n_generators, any_two = solvers.pop("generators"), solvers.pop("any_two")
    table = Table(
        title=f"W p = 0, {n_generators} generators of {result['states']} states", title_justify="left"
    )
    table.add_column("solver")
    table.add_column("largest L1 distance from gth", justify="right")
    for name, distance in solvers.items():
        table.add_row(name, f"{distance:.1e}")
    table.add_row("any two", f"{any_two:.1e}")
    console.out.print(table)

    table = Table(title=f"ε·ẋ = W(y)x, drift {result['drift']:g}", title_justify="left")
    for heading in ("ε", "sup ‖x − p_st(y)‖₁", "error / ε", "ratio to previous"):
        table.add_column(heading, justify="right")
    previous = None
    for epsilon, error in zip(result["epsilons"], result["errors"], strict=True):
        ratio = f"{previous / error:.3f}" if previous else ""
        table.add_row(f"1/{1 / epsilon:g}", f"{error:.6f}", f"{error / epsilon:.6f}", ratio)
        previous = error
    table.add_row("→ 0", "", f"{result['predicted_error_per_epsilon']:.6f}", "", style="dim")
    console.out.print(table)
    console.out.print(f"fitted order {result['order']:.4f} (theory: 1; last row: closed-form prediction)\n")

    kl = result["kl"]
    table = Table(title="φ_θ(y), trained on E‖W(y)φ(y)‖² only", title_justify="left")
    for heading in ("step", "E‖Wφ‖²", "mean KL(p_st‖φ)", "max KL"):
        table.add_column(heading, justify="right")
    last = len(kl["steps"]) - 1
    for i in sorted({0, last // 20, last // 4, last // 2, last}):
        numbers = (result["residual"][i], kl["mean"][i], kl["max"][i])
        table.add_row(str(kl["steps"][i]), *(f"{number:.1e}" for number in numbers))
    console.out.print(table)

"""The HTML page of `qkflow timescale theory`: one figure per result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qkflow.papers.fast_slow.convergence import Convergence, DriftingGenerator, circle_angles
from qkflow.papers.fast_slow.variational import FitResult
from qkflow.report.figure_page import (
    FigureSection,
    line_figure,
    line_trace,
    render_figure_page,
    sequence_colors,
)
from qkflow.report.figures import PALETTE


def render_page(
    result: Mapping[str, Any], generator: DriftingGenerator, convergence: Convergence, fit: FitResult
) -> str:
    sections = [
        _solver_section(result),
        _order_section(convergence),
        _distance_section(convergence),
        _training_section(fit),
        _manifold_section(generator, fit),
    ]
    title = f"The fast-slow limit of a generator with {generator.n_states} states"
    intro = f"Generator: {result['generator']}, seed {result['seed']}, drift {result['drift']:g}."
    return render_figure_page(title, sections, intro)


def _solver_section(result: Mapping[str, Any]) -> FigureSection:
    solvers = result["solvers"]
    distances = {name: value for name, value in solvers.items() if name not in ("generators", "any_two")}
    trace = line_trace("distance from gth", distances, distances.values(), mode="markers")
    text = (
        f"Over {solvers['generators']} generators any two of the five solvers differ by at most "
        f"{solvers['any_two']:.1e}; the condition number of the generator is {result['condition']:.3g}."
    )
    figure = line_figure([trace], "solver", height=300)
    figure["layout"]["yaxis"] |= {"exponentformat": "power", "rangemode": "tozero"}
    figures = {"Largest L1 distance from gth": figure}
    return FigureSection("Stationary distribution: four solvers against the reference", text, figures)


def _order_section(convergence: Convergence) -> FigureSection:
    epsilons = list(convergence.errors)
    predicted = [convergence.predicted_error_per_epsilon * epsilon for epsilon in epsilons]
    traces = [
        line_trace("measured", epsilons, convergence.errors.values(), PALETTE[1], "markers"),
        line_trace("ε·sup‖W#·ṗ_st‖₁ (predicted)", epsilons, predicted),
    ]
    figure = line_figure(traces, "ε", log="xy")
    ticks = [f"1/{1 / epsilon:g}" for epsilon in epsilons]
    figure["layout"]["xaxis"] |= {"tickmode": "array", "tickvals": epsilons, "ticktext": ticks}
    text = f"Fitted order {convergence.order:.4f}; theory: 1."
    return FigureSection(
        "Distance from the equilibrium manifold against ε", text, {"sup ‖x − p_st(y)‖₁": figure}
    )


def _distance_section(convergence: Convergence) -> FigureSection:
    colors = sequence_colors(len(convergence.trajectories))
    traces = [
        line_trace(
            f"ε = 1/{1 / trajectory.epsilon:g}",
            trajectory.y.tolist(),
            (trajectory.distance / trajectory.epsilon).tolist(),
            color,
        )
        for trajectory, color in zip(convergence.trajectories, colors, strict=True)
    ]
    text = "Divided by ε, the distances over one turn of y collapse onto the first-order correction."
    figures = {"‖x − p_st(y)‖₁ / ε": line_figure(traces, "slow angle y")}
    return FigureSection("Distance over one turn", text, figures)


def _training_section(fit: FitResult) -> FigureSection:
    curves = {"mean KL": fit.kl_mean, "max KL": fit.kl_max, "E‖Wφ‖² (loss)": fit.residuals}
    traces = [
        line_trace(name, fit.steps, values, color)
        for (name, values), color in zip(curves.items(), PALETTE, strict=False)
    ]
    text = f"Trained on the residual only; final mean KL(p_st‖φ): {fit.kl_mean[-1]:.1e}."
    figures = {"KL(p_st‖φ), nats": line_figure(traces, "training step", log="y")}
    return FigureSection("φ_θ as the variational approximation", text, figures)


@torch.no_grad()
def _manifold_section(generator: DriftingGenerator, fit: FitResult) -> FigureSection:
    y = circle_angles(128)
    exact, learned = generator.stationary(y), fit.phi(y)
    n_shown = min(generator.n_states, len(PALETTE))
    traces = []
    for state in exact.mean(0).argsort(descending=True)[:n_shown].tolist():
        color = PALETTE[state % len(PALETTE)]
        traces.append(line_trace(f"p_{state}", y.tolist(), exact[:, state].tolist(), color))
        points = line_trace(f"φ_{state}", y[::4].tolist(), learned[::4, state].tolist(), color, "markers")
        traces.append(points)
    text = f"Lines: exact p_st(y); points: φ_θ(y). The {n_shown} most probable states."
    figures = {"Probability": line_figure(traces, "slow angle y")}
    return FigureSection("The equilibrium manifold", text, figures)

"""The HTML page of `qkflow timescale theory`: one figure per result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qkflow.html import PlotlySection, plotly_page
from qkflow.papers.fast_slow.convergence import Convergence, DriftingGenerator, circle_angles
from qkflow.papers.fast_slow.variational import FitResult


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
    for section in sections:
        section.figure.update_layout(height=420, margin={"t": 20, "r": 20})
    title = f"The fast-slow limit of a generator with {generator.n_states} states"
    intro = f"Generator: {result['generator']}, seed {result['seed']}, drift {result['drift']:g}."
    return plotly_page(title, sections, intro)


def _solver_section(result: Mapping[str, Any]) -> PlotlySection:
    import plotly.graph_objects as go

    solvers = result["solvers"]
    distances = {name: value for name, value in solvers.items() if name not in ("generators", "any_two")}
    figure = go.Figure(go.Bar(x=list(distances), y=list(distances.values())))
    figure.update_yaxes(title="largest L1 distance from gth", exponentformat="power")
    text = (
        f"Over {solvers['generators']} generators any two of the five solvers differ by at most "
        f"{solvers['any_two']:.1e}; the condition number of the generator is {result['condition']:.3g}."
    )
    return PlotlySection("Stationary distribution: four solvers against the reference", text, figure)


def _order_section(convergence: Convergence) -> PlotlySection:
    import plotly.graph_objects as go

    epsilons, errors = list(convergence.errors), list(convergence.errors.values())
    predicted = [convergence.predicted_error_per_epsilon * epsilon for epsilon in epsilons]
    figure = go.Figure()
    figure.add_scatter(x=epsilons, y=errors, mode="markers", name="measured", marker={"size": 10})
    figure.add_scatter(x=epsilons, y=predicted, mode="lines", name="ε·sup‖W#·ṗ_st‖₁ (predicted)")
    figure.update_xaxes(type="log", title="ε", tickvals=epsilons, ticktext=[f"1/{1 / e:g}" for e in epsilons])
    figure.update_yaxes(type="log", title="sup ‖x − p_st(y)‖₁", exponentformat="power")
    text = f"Fitted order {convergence.order:.4f}; theory: 1."
    return PlotlySection("Distance from the equilibrium manifold against ε", text, figure)


def _distance_section(convergence: Convergence) -> PlotlySection:
    import plotly.graph_objects as go

    figure = go.Figure()
    for trajectory in convergence.trajectories:
        scaled = (trajectory.distance / trajectory.epsilon).tolist()
        name = f"ε = 1/{1 / trajectory.epsilon:g}"
        figure.add_scatter(x=trajectory.y.tolist(), y=scaled, mode="lines", name=name)
    figure.update_xaxes(title="slow angle y")
    figure.update_yaxes(title="‖x − p_st(y)‖₁ / ε")
    text = "Divided by ε, the distances over one turn of y collapse onto the first-order correction."
    return PlotlySection("Distance over one turn", text, figure)


def _training_section(fit: FitResult) -> PlotlySection:
    import plotly.graph_objects as go

    figure = go.Figure()
    curves = {"mean KL": fit.kl_mean, "max KL": fit.kl_max, "E‖Wφ‖² (loss)": fit.residuals}
    for name, values in curves.items():
        figure.add_scatter(x=fit.steps, y=values, mode="lines", name=name)
    figure.update_xaxes(title="training step")
    figure.update_yaxes(type="log", title="KL(p_st‖φ), nats", exponentformat="power")
    text = f"Trained on the residual only; final mean KL(p_st‖φ): {fit.kl_mean[-1]:.1e}."
    return PlotlySection("φ_θ as the variational approximation", text, figure)


@torch.no_grad()
def _manifold_section(generator: DriftingGenerator, fit: FitResult) -> PlotlySection:
    import plotly.colors
    import plotly.graph_objects as go

    y = circle_angles(128)
    exact, learned = generator.stationary(y), fit.phi(y)
    colors = plotly.colors.qualitative.D3
    n_shown = min(generator.n_states, len(colors))
    figure = go.Figure()
    for state in exact.mean(0).argsort(descending=True)[:n_shown].tolist():
        style = {"color": colors[state % len(colors)]}
        figure.add_scatter(
            x=y.tolist(), y=exact[:, state].tolist(), mode="lines", name=f"p_{state}", line=style
        )
        figure.add_scatter(
            x=y[::4].tolist(), y=learned[::4, state].tolist(), mode="markers", name=f"φ_{state}", marker=style
        )
    figure.update_xaxes(title="slow angle y")
    figure.update_yaxes(title="probability")
    text = f"Lines: exact p_st(y); points: φ_θ(y). The {n_shown} most probable states."
    return PlotlySection("The equilibrium manifold", text, figure)

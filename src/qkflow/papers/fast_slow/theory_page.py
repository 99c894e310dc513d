"""The page of `qkflow timescale theory`: one plot of each result, in one HTML file that opens offline."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import torch

from qkflow.papers.fast_slow.convergence import Convergence, DriftingGenerator, circle_angles
from qkflow.papers.fast_slow.variational import FitResult

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin:2.5rem 0 .3rem}p{margin:.3rem 0}"
)


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
    body = "".join(_render_section(*section, first=i == 0) for i, section in enumerate(sections))
    origin = f"Generator: {result['generator']}, seed {result['seed']}, drift {result['drift']:g}."
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>{html.escape(origin)}</p>{body}"
        "</body></html>\n"
    )


def _render_section(heading: str, text: str, figure: Any, first: bool) -> str:
    figure.update_layout(template="plotly_white", height=420, margin={"t": 20, "r": 20})
    # the plotting code is written into the page once, so that it needs no network
    plot = figure.to_html(full_html=False, include_plotlyjs=first, config={"displaylogo": False})
    return f"<h2>{html.escape(heading)}</h2><p>{html.escape(text)}</p>{plot}"


def _solver_section(result: Mapping[str, Any]) -> tuple[str, str, Any]:
    import plotly.graph_objects as go

    distances = {
        name: value for name, value in result["solvers"].items() if name not in ("generators", "any_two")
    }
    figure = go.Figure(go.Bar(x=list(distances), y=list(distances.values())))
    figure.update_yaxes(title="largest L1 distance from gth", exponentformat="power")
    text = (
        f"Over {result['solvers']['generators']} generators any two of the five solvers differ by at most "
        f"{result['solvers']['any_two']:.1e}; the generator's condition number is {result['condition']:.3g}."
    )
    return "The stationary distribution, four ways and a reference", text, figure


def _order_section(convergence: Convergence) -> tuple[str, str, Any]:
    import plotly.graph_objects as go

    epsilons, errors = list(convergence.errors), list(convergence.errors.values())
    figure = go.Figure()
    figure.add_scatter(x=epsilons, y=errors, mode="markers", name="measured", marker={"size": 10})
    figure.add_scatter(
        x=epsilons,
        y=[convergence.predicted_error_per_epsilon * e for e in epsilons],
        mode="lines",
        name="ε·sup‖W#·ṗ_st‖₁ (predicted)",
    )
    figure.update_xaxes(type="log", title="ε", tickvals=epsilons, ticktext=[f"1/{1 / e:g}" for e in epsilons])
    figure.update_yaxes(type="log", title="sup ‖x − p_st(y)‖₁", exponentformat="power")
    text = f"Fitted order {convergence.order:.4f}; theory says 1."
    return "Distance from the equilibrium manifold against ε", text, figure


def _distance_section(convergence: Convergence) -> tuple[str, str, Any]:
    import plotly.graph_objects as go

    figure = go.Figure()
    for path in convergence.trajectories:
        name = f"ε = 1/{1 / path.epsilon:g}"
        figure.add_scatter(
            x=path.y.tolist(), y=(path.distance / path.epsilon).tolist(), mode="lines", name=name
        )
    figure.update_xaxes(title="slow angle y")
    figure.update_yaxes(title="‖x − p_st(y)‖₁ / ε")
    text = "Divided by ε, the distances along one turn of y fall onto one curve: the first-order correction."
    return "Distance along the way", text, figure


def _training_section(fit: FitResult) -> tuple[str, str, Any]:
    import plotly.graph_objects as go

    figure = go.Figure()
    for name, values in {
        "mean KL": fit.kl_mean,
        "largest KL": fit.kl_max,
        "E‖Wφ‖² (loss)": fit.residuals,
    }.items():
        figure.add_scatter(x=fit.steps, y=values, mode="lines", name=name)
    figure.update_xaxes(title="training step")
    figure.update_yaxes(type="log", title="KL(p_st‖φ), nats", exponentformat="power")
    text = f"Trained on the residual alone, φ ends at a mean KL of {fit.kl_mean[-1]:.1e} from p_st."
    return "φ_θ as the variational approximation", text, figure


@torch.no_grad()
def _manifold_section(generator: DriftingGenerator, fit: FitResult) -> tuple[str, str, Any]:
    import plotly.colors
    import plotly.graph_objects as go

    y = circle_angles(128)
    exact, learnt = generator.stationary(y), fit.phi(y)
    colours = plotly.colors.qualitative.D3
    figure = go.Figure()
    shown = min(generator.n_states, len(colours))
    for state in exact.mean(0).argsort(descending=True)[:shown].tolist():
        line = {"color": colours[state % len(colours)]}
        figure.add_scatter(
            x=y.tolist(), y=exact[:, state].tolist(), mode="lines", name=f"p_{state}", line=line
        )
        figure.add_scatter(
            x=y[::4].tolist(), y=learnt[::4, state].tolist(), mode="markers", name=f"φ_{state}", marker=line
        )
    figure.update_xaxes(title="slow angle y")
    figure.update_yaxes(title="probability")
    text = f"Lines: p_st(y) solved exactly; points: φ_θ(y). The {shown} most probable states."
    return "The equilibrium manifold", text, figure

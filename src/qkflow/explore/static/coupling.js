// Queries and keys of a head in a plane, before the coupling and after each of its steps.
import { palette } from "./color.js";
import { find, make, number, prepareCanvas, shorten, visible } from "./dom.js";
import { CanvasPen } from "./pen.js";
import { activeToken, state } from "./state.js";

export class PlaneFigure {
  constructor(container, title, events) {
    this.title = title;
    this.canvas = make("canvas", { role: "img" });
    this.text = make("figcaption");
    this.figure = make("figure", {}, make("h3", { textContent: title }), this.canvas, this.text);
    this.table = make("div", { className: "scroll", tabIndex: 0, role: "region" });
    this.table.setAttribute("aria-label", `${title}: step size of every head`);
    this.figure.append(this.table);
    container.append(this.figure);
    this.canvas.addEventListener("pointermove", event => {
      const token = this.nearest(event);
      if (token >= 0) events.hover(token);
    });
    this.canvas.addEventListener("pointerleave", () => events.leave());
    this.canvas.addEventListener("click", event => { const token = this.nearest(event); if (token >= 0) events.choose(token); });
  }

  draw(plane, view, layer, head) {
    Object.assign(this, { plane, view, layer, head });
    const width = Math.max(260, Math.min(640, this.figure.clientWidth || 480)), height = Math.round(width * 0.8);
    this.geometry = measurePlane(plane, width, height);
    this.canvas.style.width = "100%";
    this.canvas.setAttribute("aria-label",
      `${this.title}: queries and keys of layer ${layer}, head ${head} in the plane of two principal components`);
    this.table.replaceChildren(stepTable(view));
    this.mark();
  }

  mark() {
    if (!this.plane) return;
    const { width, height } = this.geometry;
    paintPlane(new CanvasPen(prepareCanvas(this.canvas, width, height)), this.plane, this.view, this.geometry);
    const { header } = this.plane, token = Math.max(0, activeToken());
    const delta = this.view.measure("step_size", this.layer, this.head);
    const moved = `“${shorten(this.view.tokens[token])}”: q moves by ${number(header.q_shift[token])} of its length `
      + `${number(header.q_norm[token])}, k by ${number(header.k_shift[token])} of ${number(header.k_norm[token])}.`;
    const coupled = header.coupling
      ? `Coupling ${header.coupling}: ${header.equation}${header.steps > 1 ? `, ${header.steps} steps` : ""}`
        + `${delta === null ? "" : `, Δ = ${number(delta, 3)}`}. ${moved}`
      : "This layer has no coupling: q and k are scored as projected.";
    this.text.textContent = `${coupled} The plane shows ${number(100 * header.explained, 0)}% of the variance.`;
  }

  nearest(event) {
    if (!this.plane) return -1;
    const scale = this.geometry.width / this.canvas.clientWidth, step = shownStep(this.plane);
    let best = -1, distance = 15 ** 2;
    for (const name of ["q", "k"]) {
      for (let token = 0; token < this.view.size; token++) {
        const [x, y] = this.geometry.at(name, step, token);
        const d = (x - event.offsetX * scale) ** 2 + (y - event.offsetY * scale) ** 2;
        if (d < distance) [best, distance] = [token, d];
      }
    }
    return best;
  }
}

function shownStep(plane) {
  const last = plane.header.steps;
  return state.step < 0 ? last : Math.min(state.step, last);
}

export function measurePlane(plane, width, height) {
  const points = { q: plane.tensors.q[0], k: plane.tensors.k[0] }, tokens = points.q.shape[1];
  const low = [Infinity, Infinity], high = [-Infinity, -Infinity];
  for (const { values } of Object.values(points)) {
    values.forEach((value, i) => { low[i % 2] = Math.min(low[i % 2], value); high[i % 2] = Math.max(high[i % 2], value); });
  }
  const margin = 24, scale = [0, 1].map(axis => ([width, height][axis] - 2 * margin) / Math.max(1e-6, high[axis] - low[axis]));
  const at = (name, step, token) => {
    const i = 2 * (step * tokens + token), { values } = points[name];
    return [margin + (values[i] - low[0]) * scale[0], height - margin - (values[i + 1] - low[1]) * scale[1]];
  };
  return { width, height, at };
}

export function paintPlane(pen, plane, view, { width, height, at }) {
  const { ink, soft, looks, seen, line } = palette(), step = shownStep(plane), token = Math.max(0, activeToken());
  const colors = { q: `rgb(${looks})`, k: `rgb(${seen})` };
  pen.frame(0.5, 0.5, width - 1, height - 1, line);
  for (const name of ["q", "k"]) {
    for (let other = 0; other < view.size; other++) {
      if (other !== token) pen.dot(...at(name, step, other), 2.5, colors[name], 0.35, name === "k");
    }
    const path = Array.from({ length: step + 1 }, (_, s) => at(name, s, token));
    if (path.length > 1) pen.line(path, colors[name], 2);
    path.forEach(([x, y], s) => {
      pen.dot(x, y, s === step ? 6 : 3.5, colors[name], 1, name === "k");
      if (path.length > 1) pen.text(String(s), x + 8, y + 9, { color: soft, size: 10 });
    });
    const [x, y] = path.at(-1);
    pen.text(`${name} of ${shorten(visible(view.tokens[token]).trim(), 10)}`, Math.min(x + 9, width - 90), y - 9, { color: ink, size: 12 });
  }
}

function stepTable(view) {
  if (!view.measures || !view.measures.step_size) return "";
  const rows = view.measures.step_size.map((values, layer) => make("tr", {},
    make("th", { textContent: `layer ${layer}`, scope: "row" }), ...values.map(value => make("td", { textContent: number(value, 3) }))));
  const most = Math.max(...view.measures.step_size.map(values => values.length));
  const head = make("tr", {}, make("th", { textContent: "Δ", scope: "col" }),
    ...Array.from({ length: most }, (_, index) => make("th", { textContent: `head ${index}`, scope: "col" })));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}

export function setStepRange(steps) {
  const slider = find("step");
  slider.max = String(steps);
  slider.disabled = steps === 0;
  const step = state.step < 0 ? steps : Math.min(state.step, steps);
  slider.value = String(step);
  find("step-text").textContent = step === 0 ? "before the coupling" : `after step ${step} of ${steps}`;
}

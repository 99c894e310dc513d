// Attention as arcs over the text.
import { palette } from "./color.js";
import { make, prepareCanvas, shorten } from "./dom.js";
import { CanvasPen } from "./pen.js";
import { activeToken, state } from "./state.js";

const ARCS_LIMIT = 4000, LABEL = 12, BELOW = 70; // LABEL: characters

export class ArcsFigure {
  constructor(container, title, events) {
    this.title = title;
    this.canvas = make("canvas", { role: "img", tabIndex: 0 });
    this.scroll = make("div", { className: "scroll" }, this.canvas);
    container.append(make("figure", {}, make("figcaption", { textContent: title }), this.scroll));
    this.canvas.addEventListener("pointermove", event => {
      const token = this.tokenAt(event);
      if (token >= 0) events.hover(token);
    });
    this.canvas.addEventListener("pointerleave", () => events.leave());
    this.canvas.addEventListener("click", event => {
      const token = this.tokenAt(event);
      if (token >= 0) events.choose(token);
    });
    this.canvas.addEventListener("keydown", event => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter") events.choose(Math.max(0, activeToken()));
      if (!move || !this.view) return;
      event.preventDefault();
      events.hover(Math.max(0, Math.min(this.view.size - 1, activeToken() + move)));
    });
  }
  tokenAt(event) {
    if (!this.geometry) return -1;
    const token = Math.floor((event.offsetX - this.geometry.left) / this.geometry.step);
    return token >= 0 && token < this.view.size ? token : -1;
  }
  draw(view, layer, head) {
    if (!view || !view.has(layer, head)) return;
    Object.assign(this, { view, layer, head });
    const available = Math.max(280, this.scroll.clientWidth || 600);
    const step = Math.max(view.size > 400 ? 12 : 16, Math.min(64, (available - 20) / view.size));
    const width = Math.max(available - 4, Math.ceil(step * view.size) + 60);
    const above = Math.min(240, Math.max(90, (width - 60) / 5));
    const longest = Math.max(...view.tokens.map(text => shorten(text, LABEL).length));
    const labels = step > 50 ? 22 : 16 + 6 * longest; // below: they are turned
    this.geometry = { left: 10, step, width, above, labels, height: above + labels + BELOW };
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.geometry.height}px`;
    this.canvas.setAttribute("aria-label",
      `${this.title}: arcs of layer ${layer}, head ${head} over ${view.size} tokens. Arrow keys move over the tokens.`);
    this.mark();
  }
  mark() {
    if (!this.geometry) return;
    const { width, height } = this.geometry;
    paintArcs(new CanvasPen(prepareCanvas(this.canvas, width, height)), this.view, this.layer, this.head, this.geometry);
  }
}

export function paintArcs(pen, view, layer, head, { left, step, above, labels }) {
  const { ink, soft, looks, seen } = palette(), token = activeToken(), x = index => left + (index + 0.5) * step;
  const colorOf = weight => `rgb(${weight < 0 ? seen : looks})`; // as in the map, negative weights have the other color
  const arc = (from, to, weight, color, base, direction) => {
    const rise = direction * Math.min(above - 6, 10 + Math.abs(x(from) - x(to)) / 3) * 1.3;
    const alpha = Math.min(1, 0.15 + Math.abs(weight));
    pen.curve([x(from), base, x(from), base + rise, x(to), base + rise, x(to), base], color, 0.8 + 2.5 * Math.abs(weight), alpha);
  };
  const queries = state.only && token >= 0 ? [token] : view.tokens.map((_, index) => index);
  const arcs = [];
  for (const query of queries) {
    for (let key = 0; key < view.size; key++) {
      const weight = view.weight(layer, head, query, key);
      if (Math.abs(weight) >= state.threshold && key !== query) arcs.push([query, key, weight]);
    }
  }
  arcs.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]));
  for (const [query, key, weight] of arcs.slice(0, ARCS_LIMIT).reverse()) {
    const faded = token >= 0 && query !== token;
    arc(query, key, faded ? weight * 0.2 : weight, colorOf(weight), above, -1);
  }
  if (token >= 0) {
    for (let query = 0; query < view.size; query++) {
      const weight = view.weight(layer, head, query, token);
      if (query !== token && Math.abs(weight) >= state.threshold) arc(query, token, weight, `rgb(${seen})`, above + labels, 0.35);
    }
  }
  view.tokens.forEach((text, index) => pen.text(shorten(text, LABEL), x(index), above + 6, {
    color: index === token || token < 0 ? ink : soft, size: index === token ? 13 : 11, turn: step > 50 ? 0 : 60,
    anchor: step > 50 ? "center" : "start",
  }));
}

// The enlarged map of a head, with the tokens on its axes, and the marks that follow the pointer.
import { palette } from "./color.js";
import { make, number, prepareCanvas, shorten, visible } from "./dom.js";
import { CanvasPen } from "./pen.js";
import { imageCanvas, rasterize } from "./raster.js";
import { activeToken, state } from "./state.js";

const LABEL_STEP = 11; // CSS pixels between labels

export class MapFigure {
  // `events` has hover(query, key), leave(), choose(query)
  constructor(container, title, events) {
    this.title = title;
    this.base = make("canvas", { className: "base", tabIndex: 0, role: "img" });
    this.overlay = make("canvas", { className: "overlay", "aria-hidden": "true" });
    this.caption = make("figcaption");
    this.figure = make("figure", {}, this.caption, make("div", { className: "layers" }, this.base, this.overlay));
    container.append(this.figure);
    this.key = -1;
    this.base.addEventListener("pointermove", event => {
      const cell = this.cellAt(event);
      if (cell) { this.key = cell[1]; events.hover(...cell); } else this.leave(events);
    });
    this.base.addEventListener("pointerleave", () => this.leave(events));
    this.base.addEventListener("click", event => {
      const cell = this.cellAt(event);
      if (cell) events.choose(cell[0]);
    });
    this.base.addEventListener("keydown", event => this.onKey(event, events));
  }
  leave(events) { this.key = -1; events.leave(); }

  onKey(event, events) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const query = Math.max(0, activeToken());
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); events.choose(query); }
    if (event.key === "Escape") this.leave(events);
    if (!move || !this.view) return;
    event.preventDefault();
    const clamp = value => Math.max(0, Math.min(this.view.size - 1, value));
    this.key = clamp((this.key < 0 ? query : this.key) + move[1]);
    events.hover(clamp(query + move[0]), this.key);
  }

  cellAt(event) {
    if (!this.geometry) return null;
    const { left, top, cell, from, to } = this.geometry;
    const scale = this.geometry.width / this.base.clientWidth;
    const key = from + Math.floor((event.offsetX * scale - left) / cell);
    const query = from + Math.floor((event.offsetY * scale - top) / cell);
    return key >= from && key < to && query >= from && query < to ? [query, key] : null;
  }

  measureGeometry(view) {
    const width = Math.max(200, Math.min(736, this.figure.clientWidth || 480));
    const longest = Math.max(...view.tokens.map(text => [...visible(text)].length)); // of the labels
    const left = Math.round(Math.min(92, width * 0.2, 14 + 7 * longest)), top = Math.round(left * 0.85);
    const count = Math.max(1, Math.ceil(view.size / state.zoom));
    const center = state.token < 0 ? 0 : state.token;
    const from = Math.max(0, Math.min(view.size - count, center - Math.floor(count / 2)));
    const side = width - left - 14; // the labels of the last columns lean to the right
    return { width, height: top + side + 2, left, top, side, from, to: from + count, cell: side / count };
  }

  draw(view, layer, head) {
    this.view = view;
    this.layer = layer;
    this.head = head;
    if (!view || !view.has(layer, head)) {
      this.caption.textContent = `${this.title}: it has no such head`;
      this.geometry = null;
      prepareCanvas(this.base, 10, 10);
      return;
    }
    this.geometry = this.measureGeometry(view);
    const { width, height } = this.geometry;
    paintMap(new CanvasPen(prepareCanvas(this.base, width, height)), view, layer, head, this.geometry);
    this.caption.textContent = this.title;
    this.base.setAttribute("aria-label",
      `${this.title}: attention of layer ${layer}, head ${head}, ${view.size} by ${view.size} weights. `
      + "Arrow keys move, Enter keeps a token.");
    this.mark();
  }

  mark() {
    if (!this.geometry) return;
    const { width, height, left, top, side, from, to, cell } = this.geometry;
    const context = prepareCanvas(this.overlay, width, height), pen = new CanvasPen(context), token = activeToken();
    const { looks, seen, ink, paper } = palette();
    if (token < from || token >= to) return;
    const at = (token - from) * cell, thick = Math.max(cell, 2);
    pen.fill(left, top + at, side, thick, `rgb(${looks})`, 0.25);
    pen.fill(left + at, top, thick, side, `rgb(${seen})`, 0.22);
    label(pen, shorten(this.view.tokens[token]), left - 4, top + at + cell / 2, "end", ink, paper);
    if (this.key >= from && this.key < to && state.hover >= 0) {
      const x = left + (this.key - from) * cell;
      pen.frame(x, top + at, thick, thick, ink);
      const weight = number(this.view.weight(this.layer, this.head, token, this.key), 3);
      const text = `${shorten(this.view.tokens[token])} → ${shorten(this.view.tokens[this.key])}: ${weight}`;
      label(pen, text, Math.min(Math.max(x, 8), width - 170), Math.max(12, top + at - 14), "start", ink, paper);
    }
  }
}

function label(pen, text, x, y, anchor, ink, paper) {
  pen.context.font = "12px system-ui, sans-serif";
  const width = pen.context.measureText(text).width + 6;
  pen.fill(anchor === "end" ? x - width + 3 : x - 3, y - 9, width, 18, paper, 0.92);
  pen.text(text, x, y, { color: ink, size: 12, anchor });
}

export function paintMap(pen, view, layer, head, { left, top, side, from, to, cell }) {
  const { ink, line } = palette();
  pen.image(imageCanvas(rasterize(view, layer, head, from, to, Math.round(side))), left, top, side, side);
  pen.frame(left - 0.5, top - 0.5, side + 1, side + 1, line);
  const every = Math.max(1, Math.ceil(LABEL_STEP / cell)), size = Math.max(8, Math.min(12, cell * every));
  const limit = Math.floor(left / (0.55 * size));
  for (let token = from; token < to; token += every) {
    const text = shorten(visible(view.tokens[token]), limit), at = (token - from + 0.5) * cell;
    pen.text(text, left - 4, top + at, { color: ink, size, anchor: "end" });
    pen.text(text, left + at, top - 4, { color: ink, size, anchor: "start", turn: -60 });
  }
}

// Small multiples: every head as a small map, sorted by a measure.
import { make, moveWithArrows, number, roveFocus } from "./dom.js";
import { rasterize } from "./raster.js";
import { isOff, state } from "./state.js";

const THUMB = 96; // pixels
export const SORTS = {
  layer: "layer", entropy: "entropy", sink_mass: "sink mass", induction: "induction",
  previous_token: "previous token", random_induction: "induction, random words",
};
const ASCENDING = new Set(["entropy"]);

export class Grid {
  constructor(container, choose) {
    this.container = container;
    this.choose = choose;
    this.buttons = [];
    this.waiting = new Set();
    this.observer = new IntersectionObserver(entries => {
      for (const entry of entries) if (entry.isIntersecting) this.waiting.add(entry.target);
      this.schedule();
    }, { root: null, rootMargin: "200px" });
    container.addEventListener("keydown", event => {
      const columns = getComputedStyle(container).gridTemplateColumns.split(" ").length;
      moveWithArrows(event, this.buttons, columns);
    });
  }

  // `value(name, layer, head)` is the measure to sort by and to show; a difference is sorted by its size
  draw(view, value, isDifference = false) {
    Object.assign(this, { view, value });
    this.observer.disconnect();
    this.waiting.clear();
    const heads = [];
    for (let layer = 0; layer < view.nLayers; layer++) {
      for (let head = 0; head < view.nHeads(layer); head++) if (view.has(layer, head)) heads.push([layer, head]);
    }
    if (state.sort !== "layer") {
      const sign = ASCENDING.has(state.sort) && !isDifference ? 1 : -1, missing = Infinity;
      const rank = pair => {
        const x = value(state.sort, ...pair);
        return x === null ? missing : sign * (isDifference ? Math.abs(x) : x);
      };
      heads.sort((a, b) => rank(a) - rank(b) || a[0] - b[0] || a[1] - b[1]);
    }
    const columns = Math.min(5, Math.ceil(Math.sqrt(heads.length))); // few heads leave the room to the maps
    document.documentElement.style.setProperty("--heads", `${6.6 * columns + 1.8}rem`);
    this.buttons = heads.map(([layer, head]) => this.makeButton(layer, head));
    this.container.replaceChildren(...this.buttons);
    this.buttons.forEach(button => this.observer.observe(button));
    this.choice();
  }

  makeButton(layer, head) {
    const shown = state.sort === "layer" ? "entropy" : state.sort;
    const text = `${SORTS[shown]} ${number(this.value(shown, layer, head))}`;
    const canvas = make("canvas", { width: 1, height: 1 });
    const button = make("button", { type: "button" }, canvas, `L${layer} H${head}`, make("br"),
      make("span", { textContent: shown === "random_induction" ? number(this.value(shown, layer, head)) : text }));
    button.dataset.layer = layer;
    button.dataset.head = head;
    button.setAttribute("aria-label", `layer ${layer}, head ${head}, ${text}${isOff(layer, head) ? ", off" : ""}`);
    button.classList.toggle("off", isOff(layer, head));
    button.addEventListener("click", () => this.choose(layer, head));
    return button;
  }

  schedule() {
    if (this.frame || !this.waiting.size) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const end = performance.now() + 20; // leave time for the pointer
      for (const button of this.waiting) {
        this.waiting.delete(button);
        this.observer.unobserve(button);
        this.drawThumb(button);
        if (performance.now() > end) break;
      }
      this.schedule();
    });
  }

  drawThumb(button) {
    const { layer, head } = button.dataset, canvas = button.firstChild;
    const image = rasterize(this.view, Number(layer), Number(head), 0, this.view.size, THUMB);
    canvas.width = canvas.height = image.width;
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  choice() {
    const isChosen = button => Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
    this.buttons.forEach(button => {
      const pressed = String(isChosen(button));
      if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
    });
    roveFocus(this.buttons, Math.max(0, this.buttons.findIndex(isChosen)));
  }
}

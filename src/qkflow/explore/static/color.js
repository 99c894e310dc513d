// Colors of weights: 256 levels as packed pixels, for light and dark screens.
const STOPS = {
  light: [[0, 255, 255, 255], [0.25, 158, 202, 225], [0.6, 33, 113, 181], [1, 8, 29, 70]],
  dark: [[0, 17, 20, 26], [0.3, 24, 66, 120], [0.65, 66, 146, 230], [1, 235, 246, 255]],
};
const DIVERGING = {
  light: [[0, 120, 45, 0], [0.25, 222, 130, 50], [0.5, 255, 255, 255], [0.75, 90, 150, 215], [1, 8, 40, 110]],
  dark: [[0, 255, 205, 150], [0.25, 210, 110, 25], [0.5, 17, 20, 26], [0.75, 45, 115, 210], [1, 200, 228, 255]],
};
const scheme = matchMedia("(prefers-color-scheme: dark)");
let palettes = null;

function ramp(stops) {
  const packed = new Uint32Array(256), bytes = new Uint8ClampedArray(packed.buffer);
  for (let level = 0; level < 256; level++) {
    const x = level / 255;
    const next = Math.max(1, stops.findIndex(stop => stop[0] >= x));
    const [a, b] = [stops[next - 1], stops[next]], t = (x - a[0]) / (b[0] - a[0]);
    for (let c = 0; c < 3; c++) bytes[4 * level + c] = a[c + 1] + t * (b[c + 1] - a[c + 1]);
    bytes[4 * level + 3] = 255;
  }
  return packed;
}

// {sequential, diverging, ink, looks, seen}: pixels for levels 0…255, or −128…127 shifted by 128, and CSS colors.
export function palette() {
  if (!palettes) {
    const name = scheme.matches ? "dark" : "light", style = getComputedStyle(document.documentElement);
    const value = property => style.getPropertyValue(property).trim();
    palettes = {
      sequential: ramp(STOPS[name]), diverging: ramp(DIVERGING[name]), ink: value("--ink"), soft: value("--soft"),
      paper: value("--paper"), looks: value("--looks"), seen: value("--seen"), line: value("--line"),
    };
  }
  return palettes;
}

export function onThemeChange(redraw) {
  scheme.addEventListener("change", () => { palettes = null; redraw(); });
}

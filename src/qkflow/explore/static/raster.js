// Weights as an image: one pixel per weight, or the largest of a block where there are more weights than pixels.
import { palette } from "./color.js";

export function rasterize(view, layer, head, from, to, size) {
  const levels = view.levels(layer, head), n = view.size, count = to - from;
  const { sequential, diverging } = palette();
  const lut = view.signed ? diverging : sequential, shift = view.signed ? 128 : 0;
  const side = Math.min(count, size), image = new ImageData(side, side), pixels = new Uint32Array(image.data.buffer);
  if (side === count) {
    for (let row = 0; row < side; row++) {
      const begin = (from + row) * n + from;
      for (let column = 0; column < side; column++) pixels[row * side + column] = lut[levels[begin + column] + shift];
    }
    return image;
  }
  const best = new Int16Array(side * side), bins = new Uint16Array(count);
  for (let i = 0; i < count; i++) bins[i] = Math.floor(i * side / count);
  for (let row = 0; row < count; row++) {
    const begin = (from + row) * n + from, target = bins[row] * side;
    for (let column = 0; column < count; column++) {
      const level = levels[begin + column];
      if (level === 0) continue;
      const cell = target + bins[column], other = best[cell];
      if (level > other ? level > -other : level < -other && level < 0) best[cell] = level;
    }
  }
  for (let i = 0; i < best.length; i++) pixels[i] = lut[best[i] + shift];
  return image;
}

export function imageCanvas(image) {
  const canvas = document.createElement("canvas");
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

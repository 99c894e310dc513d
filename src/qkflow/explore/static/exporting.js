// Save what is shown: PNG, SVG, or the whole page as one file.
import { paintArcs } from "./arcs.js";
import { palette } from "./color.js";
import { measurePlane, paintPlane } from "./coupling.js";
import { prepareCanvas } from "./dom.js";
import { paintMap } from "./heatmap.js";
import { CanvasPen, SvgPen } from "./pen.js";

export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// Draw the figures of a panel one below the other; `figures` have geometry and what they show.
export function saveFigures(kind, format, figures, name) {
  const shown = figures.filter(figure => figure.geometry);
  const width = Math.max(...shown.map(figure => figure.geometry.width)), title = 24;
  const height = shown.reduce((sum, figure) => sum + figure.geometry.height + title, 0);
  const { paper, ink } = palette();
  const canvas = document.createElement("canvas");
  const pen = format === "svg" ? new SvgPen(width, height) : new CanvasPen(prepareCanvas(canvas, width, height));
  if (format === "png") pen.fill(0, 0, width, height, paper);
  let top = 0;
  for (const figure of shown) {
    const moved = movedPen(pen, top + title);
    pen.text(`${figure.title}, layer ${figure.layer}, head ${figure.head}`, 6, top + title / 2, { color: ink, size: 13 });
    if (kind === "map") paintMap(moved, figure.view, figure.layer, figure.head, figure.geometry);
    if (kind === "arcs") paintArcs(moved, figure.view, figure.layer, figure.head, figure.geometry);
    if (kind === "coupling") {
      paintPlane(moved, figure.plane, figure.view, measurePlane(figure.plane, figure.geometry.width, figure.geometry.height));
    }
    top += figure.geometry.height + title;
  }
  if (format === "svg") saveBlob(new Blob([pen.toString(paper)], { type: "image/svg+xml" }), `${name}.svg`);
  else canvas.toBlob(blob => saveBlob(blob, `${name}.png`), "image/png");
}

// A pen that draws lower by `shift` pixels.
function movedPen(pen, shift) {
  return {
    fill: (x, y, ...rest) => pen.fill(x, y + shift, ...rest),
    frame: (x, y, ...rest) => pen.frame(x, y + shift, ...rest),
    text: (text, x, y, ...rest) => pen.text(text, x, y + shift, ...rest),
    curve: (points, ...rest) => pen.curve(points.map((value, i) => i % 2 ? value + shift : value), ...rest),
    line: (points, ...rest) => pen.line(points.map(([x, y]) => [x, y + shift]), ...rest),
    dot: (x, y, ...rest) => pen.dot(x, y + shift, ...rest),
    image: (canvas, x, y, ...rest) => pen.image(canvas, x, y + shift, ...rest),
  };
}

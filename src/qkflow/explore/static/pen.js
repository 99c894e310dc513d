// One drawing interface for the screen and for SVG files.
const FONT = "system-ui, sans-serif";

export class CanvasPen {
  constructor(context) { this.context = context; }
  fill(x, y, width, height, color, alpha = 1) {
    this.style(alpha).fillStyle = color;
    this.context.fillRect(x, y, width, height);
  }
  frame(x, y, width, height, color) {
    Object.assign(this.style(1), { strokeStyle: color, lineWidth: 1 }).strokeRect(x, y, width, height);
  }
  text(text, x, y, { color, size = 11, anchor = "start", turn = 0 }) {
    const context = this.style(1);
    context.save();
    context.translate(x, y);
    context.rotate(turn * Math.PI / 180);
    Object.assign(context, { fillStyle: color, font: `${size}px ${FONT}`, textAlign: anchor, textBaseline: "middle" });
    context.fillText(text, 0, 0);
    context.restore();
  }
  curve(points, color, width = 1, alpha = 1) {
    const context = Object.assign(this.style(alpha), { strokeStyle: color, lineWidth: width });
    context.beginPath();
    context.moveTo(points[0], points[1]);
    context.bezierCurveTo(...points.slice(2));
    context.stroke();
  }
  line(points, color, width = 1, alpha = 1) {
    const context = Object.assign(this.style(alpha), { strokeStyle: color, lineWidth: width });
    context.beginPath();
    points.forEach(([x, y]) => context.lineTo(x, y));
    context.stroke();
  }
  dot(x, y, radius, color, alpha = 1, square = false) {
    const context = this.style(alpha);
    context.fillStyle = color;
    if (square) { context.fillRect(x - radius, y - radius, 2 * radius, 2 * radius); return; }
    context.beginPath();
    context.arc(x, y, radius, 0, 7);
    context.fill();
  }
  image(canvas, x, y, width, height) {
    Object.assign(this.style(1), { imageSmoothingEnabled: false }).drawImage(canvas, x, y, width, height);
  }
  style(alpha) { return Object.assign(this.context, { globalAlpha: alpha }); }
}

const escapeXml = text => text.replace(/[&<>"]/g, c => `&#${c.charCodeAt(0)};`).replace(/[^\t\n\r\u0020-\uFFFD\u{10000}-\u{10FFFF}]/gu, "");

export class SvgPen {
  constructor(width, height) { Object.assign(this, { width, height, parts: [] }); }
  fill(x, y, width, height, color, alpha = 1) {
    this.parts.push(`<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="${color}" opacity="${alpha}"/>`);
  }
  frame(x, y, width, height, color) {
    this.parts.push(`<rect x="${x}" y="${y}" width="${width}" height="${height}" fill="none" stroke="${color}"/>`);
  }
  text(text, x, y, { color, size = 11, anchor = "start", turn = 0 }) {
    const at = { start: "start", left: "start", center: "middle", end: "end", right: "end" }[anchor];
    this.parts.push(`<text transform="translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${turn})" font-size="${size}" `
      + `text-anchor="${at}" dominant-baseline="central" fill="${color}">${escapeXml(text)}</text>`);
  }
  curve(points, color, width = 1, alpha = 1) {
    const [x, y, ...rest] = points.map(value => value.toFixed(1));
    this.parts.push(`<path d="M${x} ${y}C${rest.join(" ")}" fill="none" stroke="${color}" stroke-width="${width}" opacity="${alpha.toFixed(3)}"/>`);
  }
  line(points, color, width = 1, alpha = 1) {
    const list = points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
    this.parts.push(`<polyline points="${list}" fill="none" stroke="${color}" stroke-width="${width}" opacity="${alpha}"/>`);
  }
  dot(x, y, radius, color, alpha = 1, square = false) {
    this.parts.push(square
      ? `<rect x="${x - radius}" y="${y - radius}" width="${2 * radius}" height="${2 * radius}" fill="${color}" opacity="${alpha}"/>`
      : `<circle cx="${x}" cy="${y}" r="${radius}" fill="${color}" opacity="${alpha}"/>`);
  }
  image(canvas, x, y, width, height) {
    this.parts.push(`<image href="${canvas.toDataURL()}" x="${x}" y="${y}" width="${width}" height="${height}" `
      + `preserveAspectRatio="none" style="image-rendering:pixelated"/>`);
  }
  toString(background) {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" `
      + `viewBox="0 0 ${this.width} ${this.height}" font-family="${FONT}"><rect width="100%" height="100%" `
      + `fill="${background}"/>${this.parts.join("")}</svg>`;
  }
}

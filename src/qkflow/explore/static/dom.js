// Small helpers. Text is only ever set as textContent: nothing that a model or a user wrote becomes markup.
export const find = id => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export const bdi = text => make("bdi", { dir: "auto", textContent: text });

// A visible form of a token: spaces, line ends and control characters have a glyph.
export function visible(text) {
  if (/^ +$/.test(text)) return "␣".repeat(Math.min(text.length, 8));
  return text.replace(/\r?\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "·");
}

export function shorten(text, limit = 14) {
  const characters = [...visible(text)];
  return characters.length > limit ? characters.slice(0, limit - 1).join("") + "…" : characters.join("");
}

export function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  return value.toFixed(digits).replace(/^-(?=0\.?0*$)/, "").replace("-", "−"); // no minus before a zero
}

// Give the one of a group of buttons that can be tabbed to; arrow keys move inside the group.
export function roveFocus(buttons, index) {
  buttons.forEach((button, i) => {
    const tabIndex = i === index ? 0 : -1;
    if (button.tabIndex !== tabIndex || !button.hasAttribute("tabindex")) button.tabIndex = tabIndex;
  });
}

export function moveWithArrows(event, buttons, columns = 1) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
  const index = buttons.indexOf(event.target.closest("button"));
  let target = index + (steps[event.key] ?? NaN);
  if (event.key === "Home") target = 0;
  if (event.key === "End") target = buttons.length - 1;
  if (index < 0 || Number.isNaN(target)) return;
  event.preventDefault();
  target = Math.max(0, Math.min(buttons.length - 1, target));
  roveFocus(buttons, target);
  buttons[target].focus();
}

// A canvas with sharp lines on every screen; drawing is in CSS pixels.
export function prepareCanvas(canvas, width, height) {
  const ratio = Math.min(window.devicePixelRatio || 1, 2, 16000 / Math.max(width, 1));
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)], context = canvas.getContext("2d");
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

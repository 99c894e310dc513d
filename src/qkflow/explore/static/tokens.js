// The text as tokens. Background: where the active token looks. Underline: who looks at it.
import { palette } from "./color.js";
import { bdi, make, moveWithArrows, number, roveFocus, shorten, visible } from "./dom.js";
import { activeToken, markedTokens, state } from "./state.js";

export class TokenStrip {
  // `events` has hover(token), leave(), choose(token)
  constructor(container, events) {
    this.container = container;
    this.buttons = [];
    const indexOf = event => this.buttons.indexOf(event.target.closest("button"));
    container.addEventListener("pointerover", event => { const i = indexOf(event); if (i >= 0) events.hover(i); });
    container.addEventListener("pointerleave", () => events.leave());
    container.addEventListener("focusin", event => { const i = indexOf(event); if (i >= 0) events.hover(i); });
    container.addEventListener("focusout", () => events.leave());
    container.addEventListener("click", event => { const i = indexOf(event); if (i >= 0) events.choose(i); });
    container.addEventListener("keydown", event => moveWithArrows(event, this.buttons));
  }

  draw(tokens, losses) {
    this.buttons = tokens.map((token, index) => {
      const button = make("button", { type: "button" }, bdi(visible(token)));
      const loss = losses && index > 0 ? `, loss ${number(losses[index - 1])}` : "";
      button.title = `token ${index}${loss}`;
      return button;
    });
    this.container.replaceChildren(...this.buttons);
    this.shades = [];
  }

  mark(view) {
    const token = activeToken(), { looks, seen } = palette(), marked = new Set(markedTokens());
    roveFocus(this.buttons, Math.max(0, token >= 0 ? token : 0));
    const valid = token >= 0 && view && view.has(state.layer, state.head);
    const percent = (weight, full) => {
      const shade = Math.round(Math.sqrt(weight) * full);
      return shade < 4 ? 0 : shade; // nobody sees less, and a long text then changes at a few tokens only
    };
    this.buttons.forEach((button, index) => {
      const out = valid ? Math.abs(view.weight(state.layer, state.head, token, index)) : 0;
      const into = valid ? Math.abs(view.weight(state.layer, state.head, index, token)) : 0;
      const shade = `${index === state.token ? 1 : 0} ${percent(out, 75)} ${percent(into, 100)}`;
      const full = `${shade} ${marked.has(index)} ${looks}`;
      if (this.shades[index] === full) return;
      this.shades[index] = full;
      button.setAttribute("aria-pressed", String(index === state.token));
      button.classList.toggle("marked", marked.has(index));
      const [, back, under] = shade.split(" ").map(Number);
      button.style.backgroundColor = back ? `rgb(${looks} / ${back}%)` : "transparent";
      button.style.borderBottomColor = under ? `rgb(${seen} / ${under}%)` : "transparent";
    });
  }
}

// "“sat” (3) looks at “cat” 0.61, …; looked at by “mat” 0.22, …"
export function describeToken(view) {
  const token = activeToken();
  if (token < 0 || !view || !view.has(state.layer, state.head)) return "";
  const top = weightAt => {
    const pairs = view.tokens.map((text, index) => [weightAt(index), text, index]);
    pairs.sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]));
    return pairs.slice(0, 3).filter(pair => Math.abs(pair[0]) > 5e-4)
      .map(([weight, text, index]) => `“${shorten(text)}” (${index}) ${number(weight)}`).join(", ") || "nothing";
  };
  const { layer, head } = state;
  return `“${shorten(view.tokens[token])}” (${token}) looks at ${top(key => view.weight(layer, head, token, key))}; `
    + `looked at by ${top(query => view.weight(layer, head, query, token))}`;
}

// The rationale of a classifier: attribution scores, mass, comprehensiveness, sufficiency.
import { bdi, make, number, visible } from "./dom.js";
import { palette } from "./color.js";

export function drawRationale(container, title, answer, tokens, classes) {
  const top = new Set(answer.top), { looks } = palette(), highest = Math.max(...answer.scores, 1e-9);
  const text = make("p", { className: "scored" }, ...tokens.map((token, index) => {
    const piece = bdi(visible(token) + " ");
    piece.style.backgroundColor = `rgb(${looks} / ${Math.round(60 * answer.scores[index] / highest)}%)`;
    if (top.has(index)) piece.style.textDecoration = "underline";
    piece.title = number(answer.scores[index], 3);
    return piece;
  }));
  const rows = [
    ["predicted class", `${classes[answer.predicted]} (${number(answer.probability)})`],
    ["comprehensiveness", number(answer.comprehensiveness, 3)],
    ["sufficiency", number(answer.sufficiency, 3)],
    ["mass on marked tokens", answer.mass === null ? "– (mark the evidence)" : number(answer.mass, 3)],
  ].map(([name, value]) => make("tr", {}, make("th", { textContent: name, scope: "row" }), make("td", { textContent: value })));
  container.append(make("h3", { textContent: title }), text, make("table", {}, make("tbody", {}, ...rows)));
}

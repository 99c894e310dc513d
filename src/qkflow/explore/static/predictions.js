// Next-token probabilities, and the logit lens: what each layer would predict.
import { bdi, make, number, visible } from "./dom.js";

const percent = p => `${(100 * p).toFixed(p < 0.1 ? 1 : 0)}%`;

export function drawPredictions(container, title, answer, token) {
  const box = make("div", {}, make("h3", { textContent: title }));
  container.append(box);
  if (!answer.rows.length) {
    box.append(make("p", { textContent: "This model does not predict the next token." }));
    return;
  }
  const last = answer.rows.at(-1);
  box.append(make("p", {}, "Next token after ", bdi(`“${visible(token)}”`), ":"), topTable(last, answer.before));
  const rows = answer.rows.map(row => make("tr", {}, make("th", { textContent: row.layer, scope: "row" }),
    make("td", {}, ...row.top.slice(0, 3).flatMap(([text, p]) => [bdi(visible(text)), ` ${percent(p)}  `])),
    make("td", { textContent: row.actual === undefined ? "–" : percent(row.actual) }),
    make("td", { textContent: row.rank === undefined ? "–" : String(row.rank) })));
  const head = ["after", "most probable", "actual next", "rank"].map(name => make("th", { textContent: name, scope: "col" }));
  box.append(make("h3", { textContent: "Logit lens" }),
    make("table", { className: "lens" }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows)));
}

function topTable(row, before) {
  const earlier = new Map(before ? before.top : []);
  const rows = row.top.map(([text, p]) => {
    const bar = make("span", { className: "bar" });
    bar.style.width = `${Math.max(1, 120 * p)}px`;
    const cells = [make("td", {}, bdi(visible(text))), make("td", {}, bar, percent(p))];
    if (before) cells.push(make("td", { textContent: earlier.has(text) ? percent(earlier.get(text)) : "–" }));
    return make("tr", {}, ...cells);
  });
  const names = ["token", "probability", ...(before ? ["with all heads"] : [])];
  return make("table", { className: "next" },
    make("thead", {}, make("tr", {}, ...names.map(name => make("th", { textContent: name, scope: "col" })))),
    make("tbody", {}, ...rows));
}

// "Loss 3.21 nats per token, 3.10 with all heads: +0.11"
export function describeEffect(view, classes, anyOff) {
  if (view.classes) {
    const best = view.classes.indexOf(Math.max(...view.classes));
    const change = anyOff ? `, ${percent(view.baseline_classes[best])} with all heads` : "";
    return `class ${classes[best]} ${percent(view.classes[best])}${change}`;
  }
  if (view.loss === null) return "";
  const change = view.loss - view.baseline_loss;
  return `loss ${number(view.loss, 3)} nats per token`
    + (anyOff ? `, ${number(view.baseline_loss, 3)} with all heads: ${change < 0 ? "−" : "+"}${number(Math.abs(change), 3)}` : "");
}

// The page: reads the address, asks for a view, draws it, and keeps both in step.
import { ArcsFigure } from "./arcs.js";
import { onThemeChange } from "./color.js";
import { PlaneFigure, setStepRange } from "./coupling.js";
import { find, make, moveWithArrows, number, roveFocus } from "./dom.js";
import { saveBlob, saveFigures } from "./exporting.js";
import { Grid, SORTS } from "./grid.js";
import { MapFigure } from "./heatmap.js";
import { describeEffect, drawPredictions } from "./predictions.js";
import { drawRationale } from "./rationale.js";
import { openSource } from "./source.js";
import { activeToken, headsOff, isOff, markedTokens, readState, setOff, state, writeState } from "./state.js";
import { describeToken, TokenStrip } from "./tokens.js";
import { Difference, View } from "./view.js";

const source = openSource();
const shared = { models: [], views: [], difference: null, shownText: "", requests: 0 };
const events = {
  hover(token) { if (state.hover !== token) { state.hover = token; markToken(); } },
  leave() { if (state.hover !== -1) { state.hover = -1; markToken(); } },
  choose(token) {
    if (find("marking").checked && state.tab === "rationale") toggleMark(token);
    else state.token = state.token === token ? -1 : token;
    changed();
    markToken();
    if (state.zoom > 1 && state.tab === "map") drawPanel();
    if (state.tab === "predictions" || state.tab === "rationale") drawPanel();
  },
};
const strip = new TokenStrip(find("tokens"), events);
const grid = new Grid(find("grid"), (layer, head) => chooseHead(layer, head));
const tabs = [...find("tabs").children];
const figures = { map: [], arcs: [], coupling: [] };

function changed() { writeState(); }

function shownView() {
  if (isDifference()) return shared.difference;
  return shared.views[Number(state.show)] || shared.views[0];
}

const isDifference = () => state.show === "difference" && shared.difference !== null;

// A measure of a model (0, 1) or of their difference; scores on random words belong to the model.
function measureOf(which, name, layer, head) {
  const score = index => name === "random_induction" ? shared.models[index].random_scores.induction[layer]?.[head] ?? null
    : shared.views[index].measure(name, layer, head);
  if (which !== "difference") return score(which);
  const [before, after] = [score(0), score(1)];
  return before === null || after === null ? null : after - before;
}
const measure = (...names) => measureOf(isDifference() ? "difference" : shared.views[Number(state.show)] ? Number(state.show) : 0, ...names);

async function load() {
  const request = ++shared.requests, text = state.text;
  setBusy("reading the text …");
  try {
    const started = performance.now();
    const payloads = [];
    for (let index = 0; index < shared.models.length; index++) payloads.push(await source.view(index, text, headsOff()));
    if (request !== shared.requests) return; // a newer request is under way
    shared.views = payloads.map(payload => new View(payload));
    shared.difference = shared.views.length > 1 ? new Difference(...shared.views) : null;
    shared.shownText = text;
    if (state.token >= shared.views[0].size) state.token = -1;
    drawAll();
    const seconds = (performance.now() - started) / 1000;
    setReady(`${shared.views[0].size} tokens${source.live ? `, ${seconds.toFixed(2)} s` : ""}`);
  } catch (error) {
    if (request === shared.requests) setFailed(error);
  }
}

function setBusy(text) {
  document.body.dataset.state = "busy";
  find("status").textContent = text;
  find("error").hidden = true;
}
function setReady(text) {
  document.body.dataset.state = "ready";
  find("status").textContent = text;
}
function setFailed(error) {
  document.body.dataset.state = "failed";
  find("status").textContent = "";
  find("error").textContent = error.message;
  find("error").hidden = false;
}

function drawAll() {
  const view = shownView();
  if (!view.has(state.layer, state.head)) [state.layer, state.head] = [0, 0];
  fillHeadMenus();
  strip.draw(view.tokens, shared.views[0].losses);
  grid.draw(view, measure, isDifference());
  find("maps").classList.toggle("small", view.size <= 64); // three maps beside one another
  drawHead();
}

function drawHead() {
  const { layer, head } = state;
  find("head-title").textContent = `Layer ${layer}, head ${head}`;
  find("layer").value = String(layer);
  find("head").value = String(head);
  drawMeasures(layer, head);
  const off = isOff(layer, head);
  find("ablate").setAttribute("aria-pressed", String(off));
  find("ablate").textContent = off ? "Head is off" : "Switch head off";
  find("ablate").hidden = !source.live && !off;
  find("restore").hidden = !state.off || !source.live;
  find("effect").textContent = shared.views
    .map((view, index) => {
      const effect = describeEffect(view, shared.models[index].classes, Boolean(state.off));
      return effect && shared.views.length > 1 ? `${shared.models[index].name}: ${effect}` : effect;
    }).filter(Boolean).join(" · ");
  drawPanel();
  markToken();
}

const MEASURES = [["entropy", "entropy"], ["sink_mass", "sink mass"], ["induction", "induction"],
  ["previous_token", "previous token"], ["random_induction", "induction, random words"], ["step_size", "Δ"]];

// One model: a line. Two: a table, and their difference.
function drawMeasures(layer, head) {
  const rows = shared.models.map((model, index) => [model.name, index]);
  if (shared.difference) rows.push([`${rows[1][0]} − ${rows[0][0]}`, "difference"]);
  const values = rows.map(([, which]) => MEASURES.map(([name]) => measureOf(which, name, layer, head)));
  const shown = MEASURES.map(([, text], i) => [text, i])
    .filter(([text, i]) => text === "induction" || values.some(row => row[i] !== null));
  const repeats = values.some(row => row[2] !== null) ? "" : "induction – (no token occurs twice)";
  if (rows.length === 1) {
    find("measures").textContent = shown
      .map(([text, i]) => text === "induction" && repeats || `${text} ${number(values[0][i])}`).join(" · ");
    return;
  }
  const cells = [["", ...shown.map(([text]) => text)], ...rows.map(([name], row) => [name, ...shown.map(([, i]) => number(values[row][i]))])];
  const table = make("table", {}, ...cells.map((row, r) => make("tr", {}, ...row.map((textContent, c) =>
    c && r ? make("td", { textContent }) : make(c || r ? "th" : "td", c || r ? { textContent, scope: r ? "row" : "col" } : {})))));
  find("measures").replaceChildren(table, repeats);
  Object.assign(find("measures"), { tabIndex: 0, role: "region", ariaLabel: "Measures of the head" }); // it scrolls on a phone
}

function drawPanel() {
  const { layer, head } = state;
  for (const tab of tabs) {
    const name = tab.id.slice(4), chosen = name === state.tab;
    tab.setAttribute("aria-selected", String(chosen));
    find(`panel-${name}`).hidden = !chosen;
  }
  roveFocus(tabs.filter(tab => !tab.hidden), tabs.filter(tab => !tab.hidden).findIndex(tab => tab.id === `tab-${state.tab}`));
  const views = shared.difference ? [...shared.views, shared.difference] : shared.views;
  find("zoom-text").textContent = state.zoom > 1 ? `${state.zoom}×` : "";
  find("zoom-in").disabled = views.length > 0 && views[0].size / state.zoom < 8;
  find("zoom-out").disabled = state.zoom <= 1;
  find("threshold").value = String(state.threshold);
  find("threshold-text").textContent = number(state.threshold);
  find("only").checked = state.only;
  if (state.tab === "map") figures.map.forEach((figure, index) => figure.draw(views[index], layer, head));
  if (state.tab === "arcs") figures.arcs.forEach((figure, index) => figure.draw(views[index], layer, head));
  if (state.tab === "coupling") askAll("coupling", drawPlanes, index => source.plane(index, shared.shownText, headsOff(), layer, head));
  if (state.tab === "predictions") {
    const token = predictedFrom();
    askAll("predictions", drawLens, index => source.lens(index, shared.shownText, headsOff(), token));
  }
  if (state.tab === "rationale") {
    askAll("rationale", drawRationales, index => shared.models[index].classes && source.rationale(
      index, shared.shownText, state.method, state.percent, markedTokens()));
  }
}

const predictedFrom = () => state.token >= 0 ? state.token : shared.views[0].size - 1;

// Ask every model, and draw the answers unless the view has changed meanwhile.
async function askAll(panel, draw, ask) {
  const key = JSON.stringify([panel, state, shared.requests]);
  shared.asked = key;
  document.body.dataset.panel = "busy";
  try {
    const answers = [];
    for (let index = 0; index < shared.models.length; index++) answers.push(await ask(index));
    if (shared.asked === key) { draw(answers); document.body.dataset.panel = panel; }
  } catch (error) {
    if (shared.asked !== key) return;
    const boxes = { coupling: "planes", predictions: "predictions", rationale: "rationale" };
    if (panel !== "coupling") find(boxes[panel]).replaceChildren(make("p", { textContent: error.message }));
    else figures.coupling.forEach(figure => { figure.plane = null; figure.text.textContent = error.message; });
    document.body.dataset.panel = "failed";
  }
}

function drawPlanes(answers) {
  setStepRange(Math.max(...answers.map(answer => answer.header.steps)));
  answers.forEach((answer, index) => figures.coupling[index].draw(answer, shared.views[index], state.layer, state.head));
}
function drawLens(answers) {
  find("predictions").replaceChildren();
  const token = shared.views[0].tokens[predictedFrom()];
  answers.forEach((answer, index) => drawPredictions(find("predictions"), shared.models[index].name, answer, token));
}
function drawRationales(answers) {
  find("rationale").replaceChildren();
  answers.forEach((answer, index) => answer && drawRationale(
    find("rationale"), shared.models[index].name, answer, shared.views[index].tokens, shared.models[index].classes));
}

function markToken() {
  const view = shownView();
  if (!view) return;
  strip.mark(view);
  find("readout").textContent = describeToken(view);
  if (figures[state.tab]) figures[state.tab].forEach(figure => figure.mark());
}

function chooseHead(layer, head) {
  Object.assign(state, { layer, head });
  changed();
  grid.choice();
  fillHeadMenus();
  drawHead();
}

function toggleMark(token) {
  const marked = markedTokens();
  state.marked = (marked.includes(token) ? marked.filter(each => each !== token) : [...marked, token]).join(",");
}

function fillHeadMenus() {
  const view = shared.views[0], count = view.nHeads(Math.min(state.layer, view.nLayers - 1));
  fillMenu(find("layer"), Array.from({ length: view.nLayers }, (_, layer) => [String(layer), String(layer)]), String(state.layer));
  fillMenu(find("head"), Array.from({ length: count }, (_, head) => [String(head), String(head)]), String(state.head));
}

function fillMenu(menu, options, value) {
  if (menu.length !== options.length) {
    menu.replaceChildren(...options.map(([name, text]) => make("option", { value: name, textContent: text })));
  }
  menu.value = value;
}

function describeModels() {
  const names = shared.models.map(model => {
    const coupling = model.couplings.length ? `, coupling ${model.couplings.join(", ")}` : "";
    return [make("b", { textContent: model.name }), ` (${model.n_heads.length} layers × ${Math.max(...model.n_heads)} heads${coupling})`];
  });
  find("models").replaceChildren(...names.flatMap((parts, index) => index ? [" and ", ...parts] : parts));
  document.title = `${shared.models.map(model => model.name).join(" and ")} – qkflow explore`;
}

function buildFigures() {
  const titles = shared.models.map(model => model.name);
  for (const title of titles) figures.coupling.push(new PlaneFigure(find("planes"), title, events));
  for (const title of titles.length > 1 ? [...titles, `${titles[1]} − ${titles[0]}`] : titles) {
    figures.map.push(new MapFigure(find("maps"), title, events));
    figures.arcs.push(new ArcsFigure(find("arcs"), title, events));
  }
  fillMenu(find("sort"), Object.entries(SORTS), state.sort);
  const shows = [...titles.map((title, index) => [String(index), title]), ["difference", `${titles[1]} − ${titles[0]}`]];
  fillMenu(find("show"), shows, state.show);
  find("show-label").hidden = titles.length < 2;
  find("tab-rationale").hidden = !source.live || !shared.models.some(model => model.classes);
  find("tab-predictions").hidden = !shared.models.some(model => model.predicts_tokens);
  for (const id of ["random", "run", "export-html"]) find(id).hidden = !source.live;
  find("ablate").disabled = !source.live; // shows whether the head was off
  find("text").readOnly = !source.live;
}

function connectControls() {
  const on = (id, type, act) => find(id).addEventListener(type, act);
  on("text-form", "submit", event => {
    event.preventDefault();
    Object.assign(state, { text: find("text").value, token: -1, hover: -1, marked: "" });
    changed();
    load();
  });
  on("text", "keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) find("text-form").requestSubmit(); });
  on("random", "click", async () => {
    try {
      const answer = await source.random(0, Math.floor(Math.random() * 1e6));
      find("text").value = answer.text;
      find("text-form").requestSubmit();
    } catch (error) { setFailed(error); }
  });
  on("export-html", "click", async () => {
    setBusy("writing the page …");
    try {
      saveBlob(await source.page(shared.shownText, headsOff()), "attention.html");
      setReady("saved");
    } catch (error) { setFailed(error); }
  });
  on("sort", "change", event => { state.sort = event.target.value; changed(); grid.draw(shownView(), measure, isDifference()); });
  on("show", "change", event => { state.show = event.target.value; changed(); drawAll(); });
  on("layer", "change", event => chooseHead(Number(event.target.value), 0));
  on("head", "change", event => chooseHead(state.layer, Number(event.target.value)));
  on("ablate", "click", () => { setOff(state.layer, state.head, !isOff(state.layer, state.head)); changed(); load(); });
  on("restore", "click", () => { state.off = ""; changed(); load(); find("ablate").focus(); });
  on("zoom-in", "click", () => zoom(2));
  on("zoom-out", "click", () => zoom(0.5));
  on("threshold", "input", event => { state.threshold = Number(event.target.value); changed(); drawPanel(); });
  on("only", "change", event => { state.only = event.target.checked; changed(); markToken(); });
  on("step", "input", event => {
    state.step = Number(event.target.value);
    changed();
    setStepRange(Number(event.target.max));
    markToken();
  });
  on("method", "change", event => { state.method = event.target.value; changed(); drawPanel(); });
  on("percent", "change", event => { state.percent = Number(event.target.value); changed(); drawPanel(); });
  on("tabs", "keydown", event => moveWithArrows(event, tabs.filter(tab => !tab.hidden)));
  for (const tab of tabs) tab.addEventListener("click", () => { state.tab = tab.id.slice(4); changed(); drawPanel(); markToken(); });
  for (const button of document.querySelectorAll("[data-export]")) {
    const { export: kind, format } = button.dataset;
    button.addEventListener("click", () => saveFigures(kind, format, figures[kind], `attention-${state.layer}-${state.head}-${kind}`));
  }
  addEventListener("hashchange", () => { readState(); if (!source.live) Object.assign(state, { text: find("text").value, off: shared.off }); showControls(); load(); });
  let resizing = 0;
  addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(() => shared.views.length && drawPanel(), 150); });
  onThemeChange(() => { if (shared.views.length) drawAll(); });
}

function zoom(factor) {
  state.zoom = Math.max(1, state.zoom * factor);
  changed();
  drawPanel();
}

function showControls() {
  find("text").value = state.text;
  find("sort").value = state.sort in SORTS ? state.sort : (state.sort = "layer");
  find("show").value = state.show;
  find("method").value = state.method;
  find("percent").value = String(state.percent);
  if (!tabs.some(tab => tab.id === `tab-${state.tab}` && !tab.hidden)) state.tab = "map";
  if (!find("show").value) find("show").value = state.show = "0";
}

async function start() {
  try {
    readState();
    const described = await source.describe();
    shared.models = described.models;
    if (!state.text || !source.live) state.text = described.text;
    shared.off = described.off;
    if (!source.live) state.off = shared.off;
    describeModels();
    buildFigures();
    showControls();
    connectControls();
    await load();
  } catch (error) { setFailed(error); }
}
start();

// What the view shows. It is kept in the address, so that a view can be reloaded and shared.
const DEFAULTS = {
  text: "", layer: 0, head: 0, token: -1, tab: "map", sort: "layer", show: "0", off: "", zoom: 1, threshold: 0.1,
  only: false, step: -1, method: "attention", percent: 20, marked: "",
};
export const state = { ...DEFAULTS, hover: -1 };

export function readState() {
  const stored = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const text = stored.get(name);
    if (text === null) state[name] = value;
    else if (typeof value === "number") state[name] = Number.isFinite(Number(text)) ? Number(text) : value;
    else if (typeof value === "boolean") state[name] = text === "true";
    else state[name] = text;
  }
}

export function writeState() {
  const stored = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (state[name] !== value) stored.set(name, state[name]);
  }
  const hash = `#${stored}`;
  if (hash !== location.hash) history.replaceState(null, "", hash === "#" ? location.pathname : hash);
}

// "0.3,1.2" <-> [[0, 3], [1, 2]]
export function headsOff() {
  return state.off.split(",").filter(Boolean).map(pair => pair.split(".").map(Number));
}
export function isOff(layer, head) { return state.off.split(",").includes(`${layer}.${head}`); }
export function setOff(layer, head, off) {
  const name = `${layer}.${head}`;
  const others = state.off.split(",").filter(pair => pair && pair !== name);
  state.off = (off ? [...others, name] : others).join(",");
}
export function markedTokens() { return state.marked.split(",").filter(Boolean).map(Number); }
export function activeToken() { return state.hover >= 0 ? state.hover : state.token; }

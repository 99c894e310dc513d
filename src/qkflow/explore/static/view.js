// The attention weights of one text, by layer and head.
export class View {
  constructor({ header, tensors }) {
    Object.assign(this, header);
    this.layers = tensors.levels;
    this.size = this.tokens.length;
  }
  get nLayers() { return this.layers.length; }
  nHeads(layer) { return this.layers[layer].shape[0]; }
  has(layer, head) { return layer < this.nLayers && head < this.nHeads(layer); }
  levels(layer, head) {
    const cells = this.size * this.size;
    return this.layers[layer].values.subarray(head * cells, (head + 1) * cells);
  }
  weight(layer, head, query, key) {
    const level = this.layers[layer].values[(head * this.size + query) * this.size + key];
    return this.largest[layer][head] * (level / (this.signed ? 127 : 255)) ** 2 * Math.sign(level);
  }
  measure(name, layer, head) {
    const rows = this.measures[name];
    return rows && rows[layer] ? rows[layer][head] ?? null : null;
  }
}

// The second view minus the first, with the same interface. Levels are computed when they are drawn.
export class Difference {
  signed = true;
  constructor(first, second) {
    Object.assign(this, { first, second, tokens: first.tokens, size: first.size, largest: [] });
    this.cache = new Map();
  }
  get nLayers() { return this.first.nLayers; }
  nHeads(layer) { return this.first.nHeads(layer); }
  has(layer, head) { return this.first.has(layer, head) && this.second.has(layer, head); }
  weight(layer, head, query, key) {
    return this.second.weight(layer, head, query, key) - this.first.weight(layer, head, query, key);
  }
  measure(name, layer, head) {
    const [a, b] = [this.first.measure(name, layer, head), this.second.measure(name, layer, head)];
    return a === null || b === null ? null : b - a;
  }
  levels(layer, head) {
    const key = `${layer}.${head}`;
    if (this.cache.has(key)) return this.cache.get(key);
    const a = decodeLevels(this.first, layer, head), b = decodeLevels(this.second, layer, head);
    let largest = 1e-9;
    for (let i = 0; i < a.length; i++) {
      b[i] -= a[i];
      if (Math.abs(b[i]) > largest) largest = Math.abs(b[i]);
    }
    const levels = new Int8Array(a.length);
    for (let i = 0; i < a.length; i++) levels[i] = Math.round(127 * Math.sqrt(Math.abs(b[i]) / largest)) * Math.sign(b[i]);
    if (this.cache.size >= 80) this.cache.clear();
    this.cache.set(key, levels);
    return levels;
  }
}

function decodeLevels(view, layer, head) {
  const table = new Float32Array(256), scale = view.largest[layer][head], shift = view.signed ? 128 : 0;
  for (let i = 0; i < 256; i++) {
    const level = i - shift;
    table[i] = scale * (level / (view.signed ? 127 : 255)) ** 2 * Math.sign(level);
  }
  const levels = view.levels(layer, head), weights = new Float32Array(levels.length);
  for (let i = 0; i < levels.length; i++) weights[i] = table[levels[i] + shift];
  return weights;
}

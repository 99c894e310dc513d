// Where answers come from: the server, or the archive inside a saved page.
import { decodePayload } from "./payload.js";

async function post(path, body) {
  const response = await fetch(`/api/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (response.ok) return response;
  const text = await response.text();
  let message = text;
  try { message = JSON.parse(text).error; } catch { /* plain text */ }
  throw new Error(message || `the server answered ${response.status}`);
}

class ServerSource {
  live = true;
  async describe() {
    const response = await fetch("/api/models");
    if (!response.ok) throw new Error(await response.text());
    return response.json();
  }
  async view(model, text, off) {
    return decodePayload(await (await post("view", { model, text, off })).arrayBuffer());
  }
  async lens(model, text, off, token) {
    return (await post("lens", { model, text, off, token })).json();
  }
  async plane(model, text, off, layer, head) {
    return decodePayload(await (await post("coupling", { model, text, off, layer, head })).arrayBuffer());
  }
  async rationale(model, text, method, percent, marked) {
    return (await post("rationale", { model, text, method, percent, marked })).json();
  }
  async random(model, seed) { return (await post("random", { model, seed })).json(); }
  async page(text, off) { return (await post("export", { text, off })).blob(); }
}

class FileSource {
  live = false;
  constructor(element) { this.element = element; }
  async describe() {
    const bytes = Uint8Array.from(atob(this.element.textContent), c => c.charCodeAt(0));
    this.element.textContent = "";
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    this.buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(this.buffer).getUint32(0, true);
    this.table = JSON.parse(new TextDecoder().decode(new Uint8Array(this.buffer, 4, length)));
    this.begin = 4 + length;
    return this.json("models");
  }
  has(name) { return name in this.table; }
  json(name) {
    const [offset, length] = this.entry(name);
    return JSON.parse(new TextDecoder().decode(new Uint8Array(this.buffer, this.begin + offset, length)));
  }
  entry(name) {
    if (!this.has(name)) throw new Error("this file has no such data: the text is too long, or it needs the server");
    return this.table[name];
  }
  async view(model) { return decodePayload(this.buffer, this.begin + this.entry(`view/${model}`)[0]); }
  async lens(model, text, off, token) { return this.json(`lens/${model}/${token}`); }
  async plane(model, text, off, layer, head) {
    return decodePayload(this.buffer, this.begin + this.entry(`coupling/${model}/${layer}/${head}`)[0]);
  }
}

export function openSource() {
  const archive = document.getElementById("archive");
  return archive ? new FileSource(archive) : new ServerSource();
}

// Figures, their controls and the sortable tables of a page. The figures are drawn when they come into view.
(function () {
  "use strict";
  const root = document.documentElement;
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map(); // name of a figure -> promise of its plot
  let figures = {};
  let observer = null;

  const element = (id) => document.getElementById(id);

  async function unpack(id) {
    const text = element(id).textContent;
    const bytes = Uint8Array.fromBase64
      ? Uint8Array.fromBase64(text)
      : Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).text();
  }

  // An inline script: the policy of the page allows this one by its hash.
  async function loadPlotly() {
    if (window.Plotly) return;
    const script = document.createElement("script");
    script.textContent = await unpack("plotly-deflated");
    document.head.append(script);
  }

  // Plots take their text and grid colors from the page, so that they follow light, dark and print.
  function themed(layout, printing) {
    const css = getComputedStyle(root);
    const color = (name) => css.getPropertyValue((printing ? "--print-" : "--") + name).trim();
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("ink") };
    const changed = { ...layout, font };
    changed.hoverlabel = { bgcolor: color("paper"), bordercolor: color("line"), font };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
      changed[name] = {
        ...layout[name],
        gridcolor: color("grid"), zerolinecolor: color("soft"), tickcolor: color("line"), linecolor: color("line"),
      };
    }
    return changed;
  }

  // Which traces the controls show: all inits or the best, one layer or the mean, one variant of a heatmap.
  function shownTraces(name) {
    const meta = figures[name].data.map((trace) => trace.meta || {});
    const value = (id, otherwise) => (element(id) ? element(id).value : otherwise);
    const layer = value("layer", "mean");
    const variant = value("heatmap-variant", "");
    const hasLayer = meta.some((each) => each.layer === layer);
    const hasVariant = meta.some((each) => each.variant === variant);
    return meta.map((each, i) => {
      if ("layer" in each) return each.layer === (hasLayer ? layer : "mean"); // one number has no layers
      if ("variant" in each) return hasVariant ? each.variant === variant : i === 0;
      if ("best" in each) return each.best || Boolean(element("all-inits") && element("all-inits").checked);
      return true;
    });
  }

  function draw(name, printing = false) {
    const place = element(name);
    if (!place || !figures[name]) return Promise.resolve();
    const shown = shownTraces(name);
    const data = figures[name].data.map((trace, i) => ({ ...trace, visible: shown[i] }));
    const plot = Plotly.react(place, data, themed(figures[name].layout, printing), config);
    drawn.set(name, plot);
    return plot.then(() => { root.dataset.drawn = drawn.size; });
  }

  function redraw(printing = false) {
    return Promise.all([...drawn.keys()].map((name) => draw(name, printing)));
  }

  function observeFigures() {
    if (observer) observer.disconnect();
    drawn.clear();
    root.dataset.drawn = 0;
    observer = new IntersectionObserver((entries) => {
      const plots = [];
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        observer.unobserve(entry.target);
        plots.push(draw(entry.target.id));
      }
      Promise.all(plots).then(() => { root.dataset.ready = "true"; });
    }, { rootMargin: "300px" });
    for (const name of Object.keys(figures)) if (element(name)) observer.observe(element(name));
  }

  function connectControls() {
    for (const id of ["all-inits", "layer", "heatmap-variant"]) {
      if (element(id)) element(id).addEventListener("change", () => redraw());
    }
    document.querySelectorAll("table.sortable").forEach(makeSortable);
    connectFilter();
  }

  function makeSortable(table) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      heading.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const ascending = heading.getAttribute("aria-sort") !== "ascending";
        for (const other of headings) other.setAttribute("aria-sort", "none");
        heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sortRows(table.tBodies[0], column, ascending ? 1 : -1);
      });
    });
  }

  function sortRows(body, column, direction) {
    const rows = [...body.rows].map((row) => ({ row, key: cellValue(row.cells[column]) }));
    const missing = (key) => key === "" || key === "–";
    rows.sort((a, b) => {
      if (missing(a.key) || missing(b.key)) return missing(a.key) - missing(b.key); // last in both directions
      const both = typeof a.key === "number" && typeof b.key === "number";
      return direction * (both ? a.key - b.key : String(a.key).localeCompare(String(b.key), "en", { numeric: true }));
    });
    body.append(...rows.map((each) => each.row));
  }

  function cellValue(cell) {
    const text = cell.dataset.v || cell.textContent.trim();
    const number = Number(text.replace("−", "-").replace(/[×%]$/, ""));
    return text === "" || Number.isNaN(number) ? text : number;
  }

  function connectFilter() {
    const [filter, status, phase] = ["run-filter", "run-status", "run-phase"].map(element);
    if (!filter) return;
    const rows = [...element("runs").tBodies[0].rows];
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const row of rows) {
        row.hidden = !(words.every((word) => texts.get(row).includes(word)) &&
          (!status.value || row.dataset.s === status.value) && (!phase.value || row.dataset.p === phase.value));
        count += !row.hidden;
      }
      element("run-count").textContent = count === rows.length ? `${count} runs` : `${count} of ${rows.length} runs`;
    };
    for (const control of [filter, status, phase]) control.addEventListener("input", apply);
    apply();
  }

  function showFigures(all) {
    figures = all;
    connectControls();
    observeFigures();
  }

  dark.addEventListener("change", () => redraw());
  window.addEventListener("beforeprint", () => {
    for (const name of Object.keys(figures)) draw(name, true);
  });
  window.addEventListener("afterprint", () => redraw());
  const plot = (place, data, layout) => Plotly.react(place, data, themed(layout, false), config);
  window.qkflowReport = { showFigures, plot };

  async function start() {
    connectControls();
    try {
      const [text] = await Promise.all([unpack("figures-deflated"), loadPlotly()]);
      figures = JSON.parse(text);
      observeFigures();
      if (!Object.keys(figures).length) root.dataset.ready = "true";
    } catch (error) {
      const note = document.createElement("p");
      note.className = "notes";
      note.textContent = `The figures cannot be drawn in this browser (${error.message}); their numbers are below them.`;
      element("content").prepend(note);
      console.error(error);
    }
  }
  if (element("figures-deflated")) start();
})();

(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  // Plots take their text and grid colors from the page, so that they follow light and dark.
  function themed() {
    const css = getComputedStyle(document.documentElement);
    const color = (name) => css.getPropertyValue(name).trim();
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: color("--ink") };
    const change = { font, hoverlabel: { bgcolor: color("--paper"), bordercolor: color("--line"), font } };
    for (const axis of ["xaxis", "yaxis"]) {
      change[axis + ".gridcolor"] = color("--grid");
      change[axis + ".zerolinecolor"] = color("--soft");
      change[axis + ".tickcolor"] = color("--line");
      change[axis + ".linecolor"] = color("--line");
    }
    return change;
  }

  function draw(name) {
    const place = document.getElementById(name);
    if (!place) return Promise.resolve();
    return Plotly.newPlot(place, figures[name].data, figures[name].layout, config)
      .then(() => Plotly.relayout(place, themed()));
  }

  Promise.all(Object.keys(figures).map(draw)).then(() => {
    document.documentElement.dataset.drawn = Object.keys(figures).length;
  });

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const name of Object.keys(figures)) Plotly.relayout(name, themed());
  });

  const allInits = document.getElementById("all-inits");
  if (allInits) allInits.addEventListener("change", () => {
    for (const name of ["loss-tokens", "loss-seconds"]) {
      if (!figures[name]) continue;
      Plotly.restyle(name, { visible: figures[name].data.map((trace) => trace.meta.best || allInits.checked) });
    }
  });

  const layer = document.getElementById("layer");
  if (layer) layer.addEventListener("change", () => {
    for (const name of Object.keys(figures)) {
      if (!name.startsWith("probe-")) continue;
      // A probe without layers (one number) is always shown.
      const layered = figures[name].data.some((trace) => trace.meta.layer === layer.value);
      const shown = layered ? layer.value : "mean";
      Plotly.restyle(name, { visible: figures[name].data.map((trace) => trace.meta.layer === shown) });
    }
  });
})();

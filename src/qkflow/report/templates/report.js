(function () {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };

  // Plots take their text and grid colours from the page, so that they follow light and dark.
  function themed() {
    const css = getComputedStyle(document.documentElement);
    const colour = (name) => css.getPropertyValue(name).trim();
    const font = { family: getComputedStyle(document.body).fontFamily, size: 13, color: colour("--ink") };
    const change = { font, hoverlabel: { bgcolor: colour("--paper"), bordercolor: colour("--line"), font } };
    for (const axis of ["xaxis", "yaxis"]) {
      change[axis + ".gridcolor"] = colour("--grid");
      change[axis + ".zerolinecolor"] = colour("--soft");
      change[axis + ".tickcolor"] = colour("--line");
      change[axis + ".linecolor"] = colour("--line");
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

  const allStarts = document.getElementById("all-starts");
  if (allStarts) allStarts.addEventListener("change", () => {
    for (const name of ["loss-tokens", "loss-seconds"]) {
      if (!figures[name]) continue;
      Plotly.restyle(name, { visible: figures[name].data.map((trace) => trace.meta.best || allStarts.checked) });
    }
  });

  const layer = document.getElementById("layer");
  if (layer) layer.addEventListener("change", () => {
    for (const name of Object.keys(figures)) {
      if (!name.startsWith("probe-")) continue;
      // A probe without layers (one number) stays as it is.
      const layered = figures[name].data.some((trace) => trace.meta.layer === layer.value);
      const wanted = layered ? layer.value : "mean";
      Plotly.restyle(name, { visible: figures[name].data.map((trace) => trace.meta.layer === wanted) });
    }
  });
})();

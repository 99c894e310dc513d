// The live part of a page: progress from the server's events, and the report again whenever it has changed.
(function () {
  "use strict";
  const element = (id) => document.getElementById(id);
  const colors = ["#1A80C4", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#A6761D", "#8C6BB1"];

  function duration(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const whole = Math.round(seconds), minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
    const two = (number) => String(number).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
  }

  function setText(target, text) {
    if (target.textContent !== text) target.textContent = text;
  }

  function showState(state) {
    const order = ["finished", "running", "silent", "failed", "waiting"];
    const counts = order.filter((name) => state.counts[name]).map((name) => `${state.counts[name]} ${name}`);
    let text = `${state.planned} runs planned: ${counts.join(", ") || "none yet"}.`;
    if (state.ended) text = `The study has ended. ${text}`;
    else if (state.seconds_left) text += ` About ${duration(state.seconds_left)} left for these.`;
    setText(element("state"), text);
    element("share").value = state.share;
    element("problem").hidden = !state.problem;
    setText(element("problem"), state.problem || "");
    document.title = `${Math.floor(100 * state.share)}% · ${state.name} · qkflow`;
  }

  function showRuns(state) {
    const rows = [...state.active, ...state.failed].map((run) => {
      const row = document.createElement("tr");
      const name = document.createElement("th");
      name.scope = "row";
      name.textContent = `${run.cell}, seed ${run.seed} (${run.phase})`;
      row.append(name);
      const cells = [
        run.error ? `${run.status}: ${run.error}` : run.status,
        `${Math.round(100 * run.share)}%`,
        run.loss === null ? "–" : run.loss.toFixed(3),
        run.tokens_per_second ? Math.round(run.tokens_per_second).toLocaleString("en") : "–",
        run.status === "running" ? duration(run.seconds_left) : "",
      ];
      cells.forEach((text, i) => {
        const cell = document.createElement("td");
        if (i === 0) cell.className = run.error ? "text long" : "text";
        cell.textContent = text;
        row.append(cell);
      });
      return row;
    });
    element("active").tBodies[0].replaceChildren(...rows);
    element("active").closest(".wide").hidden = rows.length === 0;
  }

  function showCurves(curves) {
    element("live").closest("figure").hidden = curves.length === 0;
    if (!curves.length) return;
    const data = curves.map((curve, i) => ({
      type: "scatter", mode: "lines", x: curve.x, y: curve.y, hoverinfo: "x+y",
      line: { color: colors[i % colors.length], width: 2 },
    }));
    const axis = { zeroline: false, automargin: true };
    const layout = {
      height: 240, margin: { l: 8, r: 16, t: 8, b: 40 }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: { ...axis, title: { text: "training tokens", font: { size: 12 } } }, yaxis: axis,
    };
    qkflowReport.plot(element("live"), data, layout);
    const names = curves.map((curve, i) => {
      const name = document.createElement("span");
      const dot = document.createElement("span");
      dot.className = "dot";
      name.style.setProperty("--variant", colors[i % colors.length]);
      name.append(dot, curve.name);
      return name;
    });
    element("live-legend").replaceChildren(...names);
  }

  // The reader keeps place, open tables, sorting and filters when the report is replaced.
  function readerState() {
    const main = element("content");
    return {
      scroll: scrollY,
      focus: main.contains(document.activeElement) ? document.activeElement.id : "",
      open: [...main.querySelectorAll("details")].map((each) => each.open),
      values: [...main.querySelectorAll("input, select")].map((each) => [each.id, each.type === "checkbox" ? each.checked : each.value]),
      sorted: [...main.querySelectorAll("table.sortable")].map((table) =>
        [...table.tHead.rows[0].cells].map((cell) => cell.getAttribute("aria-sort")).map((sort, i) => [i, sort]).find((each) => each[1] !== "none")),
    };
  }

  function restore(state) {
    const main = element("content");
    main.querySelectorAll("details").forEach((each, i) => { each.open = Boolean(state.open[i]); });
    for (const [id, value] of state.values) {
      const control = element(id);
      if (!control) continue;
      if (control.type === "checkbox") control.checked = value; else control.value = value;
      control.dispatchEvent(new Event(control.type === "search" ? "input" : "change"));
      if (control.tagName === "SELECT") control.dispatchEvent(new Event("input"));
    }
    main.querySelectorAll("table.sortable").forEach((table, i) => {
      if (!state.sorted[i]) return;
      const [column, direction] = state.sorted[i];
      const button = table.tHead.rows[0].cells[column].querySelector("button");
      button.click();
      if (direction === "descending") button.click();
    });
    if (state.focus && element(state.focus)) element(state.focus).focus({ preventScroll: true });
    scrollTo({ top: state.scroll, behavior: "instant" });
  }

  const events = new EventSource("/events");
  events.addEventListener("progress", (event) => {
    const state = JSON.parse(event.data);
    showState(state);
    showRuns(state);
    showCurves(state.curves);
    document.documentElement.dataset.ready = "true";
  });
  events.addEventListener("report", (event) => {
    const report = JSON.parse(event.data);
    const state = readerState();
    element("content").innerHTML = report.html; // escaped by the server's templates
    qkflowReport.showFigures(report.figures);
    restore(state);
    document.documentElement.dataset.reports = Number(document.documentElement.dataset.reports || 0) + 1;
  });
  events.addEventListener("end", () => {
    events.close();
    document.documentElement.dataset.ended = "true";
  });
  events.addEventListener("error", () => {
    if (document.documentElement.dataset.ended) return;
    element("problem").hidden = false;
    setText(element("problem"), "The server does not answer. This page shows the last state and tries again.");
  });
})();

"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const COLOURS = ["#2f6fde", "#e07b00", "#2a9d5c", "#b5379f", "#8c6d1f", "#00889c", "#d64545", "#6b57d2", "#7a9a01",
  "#c2577a", "#4a6b8a", "#a0522d", "#3c8f7c", "#9a4fd0", "#b58900", "#5f7f3f"];
const WAIT = "#c3c9d3";

function colour(operator) {
  const at = data.timeline.operators.indexOf(operator);
  return at < 0 ? "#8b93a1" : COLOURS[at % COLOURS.length];
}

function pale(hex) {
  const parts = [1, 3, 5].map((i) => Math.round(255 - (255 - parseInt(hex.slice(i, i + 2), 16)) * 0.4));
  return `rgb(${parts.join(",")})`;
}

// Nanoseconds for people: 1,234 ns, 12.35 us, 1,234.5 us, 12.35 ms.
function time(ns) {
  const size = Math.abs(ns);
  if (size < 2000) return `${number(ns, 0)} ns`;
  return size < 1e7 ? `${number(ns / 1e3, size < 1e5 ? 2 : 1)} us` : `${number(ns / 1e6, 2)} ms`;
}

function number(value, digits = 1) {
  return (value || 0).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") made.addEventListener("click", value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function drawing(tag, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function svg(width, height, label) {
  const style = `max-width:${1.3 * width}px`;
  return drawing("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, style });
}

function put(id, ...children) {
  document.getElementById(id).append(...children);
}

function table(columns, rows) {
  const head = element("tr", {}, ...columns.map((c) => element("th", { scope: "col" }, c)));
  const body = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

// Horizontal bars, each a list of [length, colour, words]; `rows`: [name, parts, words beside].
function bars(label, rows, whole) {
  const line = 19, left = 150, width = 600, made = svg(width, rows.length * line + 4, label);
  const most = whole || Math.max(1, ...rows.map(([, parts]) => parts.reduce((sum, p) => sum + p[0], 0)));
  rows.forEach(([name, parts, words], i) => {
    let at = left;
    made.append(drawing("text", { x: left - 6, y: i * line + 14, "text-anchor": "end" }, name));
    for (const [length, fill, said] of parts) {
      const wide = Math.max(0, length / most * (width - left - 110));
      const bar = drawing("rect", { x: at, y: i * line + 3, width: wide, height: line - 5, fill });
      bar.append(drawing("title", {}, said));
      made.append(bar);
      at += wide;
    }
    made.append(drawing("text", { x: at + 5, y: i * line + 14, class: "soft" }, words));
  });
  return made;
}

function shareBars(label, shares, total, fill) {
  return bars(label, shares.map((s) => {
    const name = s.name === "" ? "no layer" : s.name, tint = fill(s);
    return [name, [
      [s.work, tint, `${name}: work ${time(s.work)}`],
      [s.data, pale(tint), `${name}: waiting for data ${time(s.data)}`],
      [s.others, WAIT, `${name}: waiting for others ${time(s.others)}`],
    ], `${time(s.work + s.data + s.others)}, ${number(100 * (s.work + s.data + s.others) / total)} %`];
  }));
}

function axis(made, left, top, width, height, xs, ys) {
  made.append(drawing("path", { d: `M${left},${top}V${top + height}H${left + width}`, fill: "none", stroke: "#8b93a1" }));
  for (const [at, words] of xs) {
    const anchor = at < 0.05 ? "start" : at > 0.95 ? "end" : "middle";
    made.append(drawing("text", { x: left + at * width, y: top + height + 14, "text-anchor": anchor }, words));
  }
  for (const [at, words] of ys) {
    made.append(drawing("text", { x: left - 5, y: top + height * (1 - at) + 4, "text-anchor": "end" }, words));
  }
}

function ratesChart(r, length) {
  const made = svg(1000, 220, "Bytes a second over a step"), left = 55, top = 10, width = 930, height = 180;
  const most = Math.max(r.ceiling, ...r.gbps) * 1.05 || 1;
  const y = (gbps) => top + height * (1 - gbps / most);
  const start = length - r.bin * r.gbps.length;
  axis(made, left, top, width, height, [0, 0.25, 0.5, 0.75, 1].map((f) => [f, time(start + f * (length - start))]),
    [0, 0.5, 1].map((f) => [f, number(f * most)]));
  const points = r.gbps.map((g, i) => `H${left + i / r.gbps.length * width}V${y(g)}`);
  made.append(drawing("path", {
    d: `M${left},${y(0)}${points.join("")}H${left + width}V${y(0)}Z`, fill: "#cfe0fa", stroke: "#2f6fde", "stroke-width": 1,
  }));
  for (const [gbps, words, stroke, at] of [[r.ceiling, "ceiling", "#b3261e", width], [r.mean, "mean", "#5d6675", 130]]) {
    if (!gbps) continue;
    made.append(drawing("line", { x1: left, x2: left + width, y1: y(gbps), y2: y(gbps), stroke, "stroke-dasharray": "5 4" }));
    made.append(drawing("text", { x: left + at, y: y(gbps) - 3, "text-anchor": "end" }, `${words} ${number(gbps)} GB/s`));
  }
  return made;
}

function histogram(h) {
  const made = svg(420, 150, `Latencies of ${h.kind}`), left = 40, top = 8, width = 370, height = 115;
  const most = Math.max(1, ...h.counts), bins = h.counts.length;
  axis(made, left, top, width, height, [0, 1, 2, 3, 4].map((f) => [f / 4, time(h.edges[Math.round(f * bins / 4)])]),
    [[1, String(most)]]);
  h.counts.forEach((count, i) => {
    const wide = width / bins;
    made.append(drawing("rect", {
      x: left + i * wide, width: Math.max(0.5, wide - 1), y: top + height * (1 - count / most),
      height: height * count / most, fill: "#2f6fde",
    }));
  });
  return made;
}

function rooflineChart(r, gbps) {
  const made = svg(600, 330, "Roofline"), left = 60, top = 12, width = 520, height = 280;
  const shown = r.operators.filter((o) => o.intensity > 0 && o.gflops > 0);
  if (!shown.length) return element("p", {}, "No operator reads weights or KV.");
  const xs = [Math.min(...shown.map((o) => o.intensity)) / 4, Math.max(...shown.map((o) => o.intensity)) * 4];
  const ys = [Math.min(...shown.map((o) => o.gflops)) / 4,
    Math.max(...shown.map((o) => Math.max(o.gflops, gbps * o.intensity))) * 4];
  const at = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
  const x = (v) => left + width * at(v, xs), y = (v) => top + height * (1 - at(v, ys));
  const ticks = (range) => {
    const out = [];
    for (let p = Math.ceil(Math.log10(range[0])); p <= Math.log10(range[1]); p++) out.push([at(10 ** p, range), String(10 ** p)]);
    return out;
  };
  axis(made, left, top, width, height, ticks(xs), ticks(ys));
  made.append(drawing("text", { x: left + width, y: top + height + 28, "text-anchor": "end", class: "soft" }, "operations per byte"));
  made.append(drawing("text", { x: left + 4, y: top + 10, class: "soft" }, "GFLOP/s"));
  if (gbps) {
    const points = [];
    for (let i = 0; i <= 60; i++) {
      const v = xs[0] * (xs[1] / xs[0]) ** (i / 60);
      points.push(`${x(v)},${Math.max(top, y(Math.max(ys[0], Math.min(gbps * v, r.gflops || Infinity))))}`);
    }
    made.append(drawing("polyline", { points: points.join(" "), fill: "none", stroke: "#b3261e" }));
  }
  for (const o of shown) {
    const dot = drawing("circle", { cx: x(o.intensity), cy: y(o.gflops), r: 4 + 14 * Math.sqrt(Math.min(1, o.share)),
      fill: colour(o.operator), "fill-opacity": 0.75 });
    dot.append(drawing("title", {}, `${o.operator}: ${number(o.gbps)} GB/s, ${number(o.gflops)} GFLOP/s`));
    made.append(dot);
  }
  return made;
}

function showAnalysis(a) {
  const b = a.breakdown, kinds = { operator: "operators", hop: "hops", data: "data" };
  for (const [name, value, words] of a.figures) {
    put("figures", element("div", { class: "figure" }, name, element("strong", {}, value), element("small", {}, words)));
  }
  put("breakdown-note", `${b.rows} rows x ${time(b.length)} = ${time(b.total)} a step, the mean of ${a.step.steps}. `
    + `Waiting for the next step's header: ${time(b.header)}. Idle: ${time(b.idle)} (${number(100 * b.idle / b.total)} %).`);
  put("by-operator", element("h3", {}, "By operator"), shareBars("By operator", b.operators, b.total, (s) => colour(s.name)),
    table(["operator", "work", "for data", "for others", "of all"], [
      ...b.operators.map((s) => [s.name, time(s.work), time(s.data), time(s.others),
        `${number(100 * (s.work + s.data + s.others) / b.total)} %`]),
      ["next step's header", "", "", time(b.header), `${number(100 * b.header / b.total)} %`],
      ["idle", "", "", time(b.idle), `${number(100 * b.idle / b.total)} %`],
    ]));
  put("by-layer", element("h3", {}, "By layer"), shareBars("By layer", b.layers, b.total, () => "#2f6fde"));
  if (b.workers.length <= 64) {
    put("by-worker", element("h3", {}, "By row"), shareBars("By row", b.workers, b.length, () => "#2f6fde"));
  }
  put("rates-note", `${number(a.rates.bytes / 1e6)} MB in step ${a.step.number}; ceiling ${number(a.rates.ceiling)} GB/s `
    + `(${a.rates.source}); at it the step would take ${time(a.rates.floor)}.`);
  put("rates", ratesChart(a.rates, a.step.length));
  put("path-by", element("h3", {}, "What it is made of"), bars("Critical path", a.path.by.map(([name, ns]) =>
    [name, [[ns, colour(name), name]], `${time(ns)}, ${number(100 * ns / a.step.length)} %`])));
  put("what-if", element("h3", {}, "How much shorter the step would be if this were free"), bars("What if",
    a.what_if.map((w) => [w.what, [[w.saved, w.kind === "operator" ? colour(w.what) : "#8b93a1", kinds[w.kind]]],
      `${time(w.saved)}, ${number(100 * w.saved / a.step.length)} %`])));
  put("path-tasks", table(["record", "worker", "begins", "hops", "for data", "work", "came after"], a.path.tasks.map((t) => [
    recordLink(t.id, `${data.timeline.nodes[t.node][0]} ${t.first}+${t.count}`), t.worker, time(t.begin), time(t.hop),
    time(t.data), time(t.work), t.from ? recordLink(t.from) : "the record before"])));
  put("hops-note", `From a publication to the moment that a waiting worker has seen it. Edges of ${a.hop_steps} steps, `
    + `headers of ${a.step.steps}. A header is published before its step is over, so its latency can be below zero.`);
  for (const h of a.hops) {
    put("hops", element("h3", {}, h.kind), element("p", {}, h.seen ? `${h.seen} of ${h.waits} waits were open when the last `
      + `publication came. Median ${time(h.median)}, 90 % ${time(h.p90)}, 99 % ${time(h.p99)}, most ${time(h.most)}, `
      + `least ${time(h.least)}.` : `none of ${h.waits} waits was open when the last publication came.`));
    if (h.seen) put("hops", histogram(h));
  }
  put("imbalance", a.imbalance.length ? table(["operator", "workers", "first done", "last done", "between", "busiest"],
    a.imbalance.map((i) => [i.operator, String(i.workers), time(i.first), time(i.last), time(i.spread), number(i.busiest, 2)]))
    : element("p", {}, "No node runs on more than one worker."));
  put("slack", table(["node", "least", "median", "most"], a.slack.map((s) => [s.node, time(s.least), time(s.median), time(s.most)])));
  showLookahead(a.lookahead);
  put("roofline", rooflineChart(a.roofline, a.rates.ceiling));
  put("roofline-table", table(["operator", "op/byte", "GB/s", "GFLOP/s", "of the time"], a.roofline.operators.map((o) =>
    [o.operator, number(o.intensity, 2), number(o.gbps), number(o.gflops), `${number(100 * o.share)} %`])));
  showPrediction(a.prediction);
}

function showLookahead(l) {
  const count = (pairs) => pairs.reduce((sum, [, n]) => sum + n, 0);
  const rows = (pairs, name) => bars(name, pairs.slice(0, 24).map(([value, n]) =>
    [`${value} records`, [[n, "#2f6fde", `${n}`]], `${n}`]));
  if (l.lead.length) {
    put("lookahead", element("p", {}, `Records that the producer had read ahead when a record was begun`
      + (l.bytes === null ? "." : `; median ${number(l.bytes / 1024)} KiB of a ring of ${number(l.ring / 1024)} KiB.`)),
    rows(l.lead, "read ahead"));
  }
  put("lookahead", element("p", {}, l.open.length ? `When a record began to wait (${count(l.open)} times), how many of the `
    + `${l.behind} behind it in its queue had nothing to wait for:` : "No record waited along an edge."),
  ...(l.open.length ? [rows(l.open, "open behind")] : []));
}

function showPrediction(p) {
  if (!p) {
    put("prediction", element("p", {}, "There is no prediction; a note at the top says why."));
    return;
  }
  const off = (us) => `${us >= p.measured ? "+" : ""}${number(100 * (us / p.measured - 1))} %`;
  put("prediction", table(["step", "us", "error"], [
    [`measured, median of ${p.steps} steps that nothing was fitted to`, number(p.measured), ""],
    ["simulated with figures fitted to the other steps", number(p.predicted), off(p.predicted)],
    [`simulated with the figures of ${p.target}`, number(p.bare), off(p.bare)],
  ]), element("h3", {}, "Operators that differ most (slowest worker of each node)"),
  table(["operator", "measured us", "simulated us", "difference"], p.operators.map((o) =>
    [o.operator, number(o.measured_us), number(o.predicted_us), number(o.predicted_us - o.measured_us)])));
}

function recordLink(id, words) {
  return element("a", { class: "record", onclick: () => picture.select(picture.byId(id), true) }, words || picture.nameOf(id));
}

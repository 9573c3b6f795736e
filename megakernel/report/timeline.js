"use strict";
// The picture of all records, and what is said of the one that was clicked.
const picture = (() => {
  const t = data.timeline, events = decode(t.events), count = t.events.count;
  const canvas = document.getElementById("canvas"), pen = canvas.getContext("2d");
  const LEFT = 130, TOP = 24, ROW = t.rows.length > 40 ? 12 : t.rows.length > 8 ? 22 : 40, MOST_HEIGHT = 560, LISTED = 40;
  const end = (i) => events.start[i] + events.length[i];
  let last = 0;
  for (let i = 0; i < count; i++) last = Math.max(last, end(i));
  const view = { from: 0, to: last || 1, scroll: 0, chosen: -1, path: false, find: "", hidden: new Set() };
  const rows = t.rows.map(() => []), ids = new Map(), nodes = new Map();
  for (let i = 0; i < count; i++) {
    rows[events.row[i]].push(i);
    ids.set(idOf(i), i);
    const key = `${events.step[i]}.${events.node[i]}`;
    if (!nodes.has(key)) nodes.set(key, []);
    nodes.get(key).push(i);
  }
  for (const row of rows) row.sort((a, b) => events.start[a] - events.start[b]);
  const onPath = new Map((data.analysis ? data.analysis.path.tasks : []).map((p) => [p.id, p.from]));

  function decode(columns) {
    const types = { f8: Float64Array, f4: Float32Array, i4: Int32Array }, out = {};
    for (const [name, column] of Object.entries(columns)) {
      if (name === "count") continue;
      const bytes = Uint8Array.from(atob(column[1]), (c) => c.charCodeAt(0));
      out[name] = new types[column[0]](bytes.buffer);
    }
    return out;
  }

  function idOf(i) {
    return [events.step[i], events.worker[i], events.role[i], events.record[i], events.tile_begin[i]].join(".");
  }
  const operatorOf = (i) => t.operators[t.nodes[events.node[i]][1]];
  const nameAt = (i) => `${t.nodes[events.node[i]][0]} ${events.tile_begin[i]}+${events.tile_count[i]}`;

  // ---------------------------------------------------------------------------------------------- edges
  // What a record waited for, or (forward) who waited for it: [event, kind, counter], the last to end first. Of a record's
  // roles those wait that the analysis takes for it; the one that ends last publishes.
  function neighbours(i, forward) {
    if (forward ? events.role[i] === t.producer : !t.waiting.includes(events.role[i])) return [];
    const mine = forward ? "producer" : "consumer", other = forward ? "consumer" : "producer", out = new Map();
    const first = events.tile_begin[i], stop = first + events.tile_count[i], e = t.edges;
    for (let k = 0; k < e.kind.length; k++) {
      if (e[mine][k] !== events.node[i]) continue;
      if (e[`${mine}_first`][k] >= stop || e[`${mine}_first`][k] + e[`${mine}_count`][k] <= first) continue;
      const from = e[`${other}_first`][k], to = from + e[`${other}_count`][k];
      for (const j of nodes.get(`${events.step[i]}.${e[other][k]}`) || []) {
        if (events.tile_begin[j] >= to || events.tile_begin[j] + events.tile_count[j] <= from) continue;
        if (forward ? !t.waiting.includes(events.role[j]) : events.role[j] === t.producer) continue;
        const key = `${events.worker[j]}.${events.record[j]}.${events.tile_begin[j]}`, known = out.get(key);
        if (!known || end(j) > end(known[0])) out.set(key, [j, t.kinds[e.kind[k]], e.counter[k]]);
      }
    }
    return [...out.values()].sort((a, b) => end(b[0]) - end(a[0]));
  }

  // ---------------------------------------------------------------------------------------------- drawing
  const width = () => canvas.clientWidth, across = () => Math.max(1, width() - LEFT);
  const height = () => Math.min(MOST_HEIGHT, TOP + t.rows.length * ROW + 6);
  const x = (at) => LEFT + (at - view.from) / (view.to - view.from) * across();
  const y = (row) => TOP + row * ROW - view.scroll;
  const hue = (i) => colour(operatorOf(i));

  function faded(i) {
    return view.hidden.has(operatorOf(i)) || (view.find && !t.nodes[events.node[i]][0].includes(view.find))
      || (view.path && !onPath.has(idOf(i)));
  }

  function firstIn(row) {
    let low = 0, high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end(row[middle]) < view.from) low = middle + 1; else high = middle;
    }
    return low;
  }

  // As much of a name as fits, white.
  function label(name, from, to, base) {
    let words = name;
    while (words && pen.measureText(words).width > to - from - 4) words = words.slice(0, -1);
    pen.fillStyle = "#fff";
    pen.fillText(words, from, base);
  }

  function drawEvent(i, top, tall) {
    const s = events.start[i], marks = [s, s + events.ready[i], s + events.first_data[i], end(i)].map(x);
    pen.globalAlpha = faded(i) ? 0.12 : 1;
    [WAIT, pale(hue(i)), hue(i)].forEach((fill, k) => {
      if (marks[k + 1] <= marks[k]) return;
      pen.fillStyle = fill;
      pen.fillRect(marks[k], top, Math.max(0.5, marks[k + 1] - marks[k]), tall);
    });
    if (marks[3] - Math.max(marks[2], LEFT) > 46 && tall > 11) {
      label(nameAt(i), Math.max(marks[2], LEFT) + 4, marks[3], top + tall / 2 + 4);
    }
    if (events.flags[i] & t.flags.cut) {
      pen.fillStyle = "#b3261e";
      pen.fillRect(marks[3] - 3, top, 3, tall);
    }
    pen.globalAlpha = 1;
  }

  function draw() {
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${height()}px`;
    canvas.width = width() * scale;
    canvas.height = height() * scale;
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width(), height());
    pen.font = "11px system-ui, sans-serif";
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP, across(), height() - TOP);
    pen.clip();
    rows.forEach((row, r) => {
      const top = y(r) + 1;
      if (top > height() || top + ROW < TOP) return;
      let pixel = -1;
      for (let k = firstIn(row); k < row.length && events.start[row[k]] <= view.to; k++) {
        const right = Math.floor(x(end(row[k])));
        if (right === pixel) continue; // several records in one column of pixels: one is drawn
        pixel = right;
        drawEvent(row[k], top, ROW - 3);
      }
    });
    drawBounds();
    if (view.chosen >= 0) drawChosen();
    pen.restore();
    drawLabels();
    document.getElementById("range").textContent = `${time(view.from)} to ${time(view.to)}`;
  }

  function drawBounds() {
    pen.strokeStyle = "#1d2330";
    pen.setLineDash([3, 3]);
    for (const [, begin, stop] of t.bounds) {
      for (const at of [begin, stop]) line(x(at), TOP, x(at), height());
    }
    pen.setLineDash([]);
  }

  function line(x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  function drawChosen() {
    const i = view.chosen, middle = (j) => y(events.row[j]) + ROW / 2;
    pen.strokeStyle = "#0b63c5";
    for (const [j] of neighbours(i, false).slice(0, LISTED)) line(x(end(j)), middle(j), x(events.start[i] + events.ready[i]), middle(i));
    pen.strokeStyle = "#b5379f";
    for (const [j] of neighbours(i, true).slice(0, LISTED)) line(x(end(i)), middle(i), x(events.start[j] + events.ready[j]), middle(j));
    pen.strokeStyle = "#1d2330";
    pen.lineWidth = 2;
    pen.strokeRect(x(events.start[i]), y(events.row[i]), Math.max(2, x(end(i)) - x(events.start[i])), ROW - 1);
    pen.lineWidth = 1;
  }

  function drawLabels() {
    pen.fillStyle = "#1d2330";
    for (let r = 0; r < t.rows.length; r++) {
      if (y(r) >= TOP - 2 && y(r) < height()) pen.fillText(t.rows[r], 6, y(r) + ROW / 2 + 4);
    }
    const step = 10 ** Math.floor(Math.log10((view.to - view.from) / 4)), wide = (view.to - view.from) / step > 12 ? 5 * step : step;
    for (let at = Math.ceil(view.from / wide) * wide; at <= view.to; at += wide) {
      pen.fillText(time(at), x(at) + 3, 15);
      pen.fillRect(x(at), 4, 1, TOP - 4);
    }
  }

  // ---------------------------------------------------------------------------------------------- moving
  function show(from, to) {
    const span = Math.max(50, Math.min(to - from, last || 1));
    view.from = Math.max(0, Math.min(from, (last || 1) - span));
    view.to = view.from + span;
    draw();
  }

  function zoom(factor, at = (view.from + view.to) / 2) {
    show(at - (at - view.from) * factor, at + (view.to - at) * factor);
  }

  function scroll(by) {
    const most = Math.max(0, TOP + t.rows.length * ROW + 6 - height());
    view.scroll = Math.max(0, Math.min(most, view.scroll + by));
    draw();
  }

  function showStep(number) {
    const bound = t.bounds.find((b) => b[0] === number);
    let [from, to] = bound ? [bound[1], bound[2]] : [Infinity, 0];
    for (let i = 0; !bound && i < count; i++) {
      if (events.step[i] === number) [from, to] = [Math.min(from, events.start[i]), Math.max(to, end(i))];
    }
    if (to > from) show(from - (to - from) * 0.02, to + (to - from) * 0.02);
  }

  function at(px, py) {
    const row = rows[Math.floor((py - TOP + view.scroll) / ROW)];
    if (!row || px < LEFT || py < TOP) return -1;
    const moment = view.from + (px - LEFT) / across() * (view.to - view.from), slop = (view.to - view.from) / across();
    let best = -1;
    for (let k = Math.max(0, firstIn(row) - 1); k < row.length && events.start[row[k]] <= moment + slop; k++) {
      if (end(row[k]) >= moment - slop) best = row[k];
    }
    return best;
  }

  // ---------------------------------------------------------------------------------------------- one record
  function select(i, center) {
    if (i === undefined || i < 0) return;
    view.chosen = i;
    if (center) {
      const span = Math.min(view.to - view.from, Math.max(events.length[i] * 12, 20000));
      const middle = events.start[i] + events.length[i] / 2, high = height() - TOP;
      if (y(events.row[i]) < TOP || y(events.row[i]) > height() - ROW) view.scroll = Math.max(0, events.row[i] * ROW - high / 2);
      show(middle - span / 2, middle + span / 2);
      scroll(0);
      canvas.scrollIntoView({ block: "nearest" });
    }
    draw();
    document.getElementById("selected").replaceChildren(...describe(i));
  }

  function describe(i) {
    const node = t.nodes[events.node[i]], s = events.start[i];
    const waits = neighbours(i, false), signals = neighbours(i, true);
    const rowsOf = (list) => list.slice(0, LISTED).map(([j, kind, counter]) => [link(j), String(events.worker[j]),
      kind === "counter" ? `counter ${counter}` : kind, time(end(j) - s)]);
    const more = (list) => list.length > LISTED ? element("p", {}, `and ${list.length - LISTED} more`) : "";
    const record = [
      ["record", `${events.record[i]} of ${t.rows[events.row[i]]}, step ${events.step[i]}`],
      ["task", `${node[2]}, layer ${node[3] < 0 ? "none" : node[3]}`],
      ["tiles", `${events.tile_begin[i]} to ${events.tile_begin[i] + events.tile_count[i] - 1} of ${node[4]}`],
      ["reads", `${number(node[5] * events.tile_count[i] / Math.max(1, node[4]) / 1024)} KiB of weights and KV`],
      ["waited for others", time(events.ready[i])],
      ["waited for data", time(events.first_data[i] - events.ready[i])],
      ["worked", time(events.end[i] - events.first_data[i])],
      ["until published", events.flags[i] & t.flags.cut ? "never: cut by the fault" : time(events.published[i] - events.end[i])],
      ["longest wait", events.waited[i] ? `${time(events.waited[i])}${waitedFor(i)}` : "none"],
      ["slack", events.slack[i] < 0 ? "not known of this step" : time(events.slack[i])],
      ["critical path", onPath.has(idOf(i)) ? "yes" : "no"],
    ];
    for (const [name, value] of Object.entries(node[7])) record.push([name, value]);
    return [
      element("div", {}, element("h3", {}, nameAt(i)), table(["", ""], record)),
      element("div", {}, element("h3", {}, `Waited for (${waits.length}), times from its start`),
        table(["record", "worker", "by", "published"], rowsOf(waits)), more(waits)),
      element("div", {}, element("h3", {}, `Signals (${signals.length}), times from its start`),
        table(["record", "worker", "by", "ended"], rowsOf(signals)), more(signals)),
    ];
  }

  function waitedFor(i) {
    if (events.counter[i] < 0) return "";
    if (events.flags[i] & t.flags.by_value) return `, for values of ${(t.nodes[events.counter[i]] || ["?"])[0]}`;
    return `, for counter ${events.counter[i]}`;
  }

  function link(j) {
    return element("a", { class: "record", onclick: () => select(j, true) }, nameAt(j));
  }

  // ---------------------------------------------------------------------------------------------- controls
  function pointer() {
    let held = null;
    canvas.addEventListener("pointerdown", (e) => {
      held = { x: e.offsetX, y: e.offsetY, from: view.from, to: view.to, scroll: view.scroll, moved: false };
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointermove", (e) => {
      if (held) {
        held.moved ||= Math.hypot(e.offsetX - held.x, e.offsetY - held.y) > 4;
        const by = (held.x - e.offsetX) / across() * (held.to - held.from);
        if (held.moved) {
          show(held.from + by, held.to + by);
          view.scroll = held.scroll;
          scroll(held.y - e.offsetY);
        }
      }
      hover(e.offsetX, e.offsetY, !held);
    });
    canvas.addEventListener("pointerup", (e) => {
      if (held && !held.moved) select(at(e.offsetX, e.offsetY));
      held = null;
    });
    canvas.addEventListener("pointerleave", () => hover(0, 0, false));
    canvas.addEventListener("wheel", (e) => {
      e.preventDefault();
      if (e.shiftKey) scroll(e.deltaY || e.deltaX);
      else zoom(Math.exp(Math.sign(e.deltaY) * 0.25), view.from + (e.offsetX - LEFT) / across() * (view.to - view.from));
    }, { passive: false });
  }

  function hover(px, py, wanted) {
    const tip = document.getElementById("tip"), i = wanted ? at(px, py) : -1;
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.textContent = `${nameAt(i)}\n${time(events.length[i])}, of it ${time(events.ready[i])} waiting for others`;
    tip.style.left = `${Math.min(px + 12, width() - 260)}px`;
    tip.style.top = `${py + 14}px`;
  }

  function keyboard(e) {
    const span = view.to - view.from, row = view.chosen >= 0 ? rows[events.row[view.chosen]] : null;
    const next = (by) => row && select(row[row.indexOf(view.chosen) + by]);
    const keys = {
      ArrowLeft: () => show(view.from - span / 5, view.to - span / 5),
      ArrowRight: () => show(view.from + span / 5, view.to + span / 5),
      ArrowUp: () => scroll(-3 * ROW), ArrowDown: () => scroll(3 * ROW),
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), ",": () => next(-1), ".": () => next(1),
    };
    if (keys[e.key]) {
      e.preventDefault();
      keys[e.key]();
    }
  }

  function legend() {
    for (const operator of t.operators) {
      const key = element("span", { class: "key", style: `background:${colour(operator)}` });
      const button = element("button", { "aria-pressed": "true", onclick: () => {
        if (!view.hidden.delete(operator)) view.hidden.add(operator);
        button.setAttribute("aria-pressed", String(!view.hidden.has(operator)));
        draw();
      } }, key, operator);
      put("legend", button);
    }
  }

  function controls() {
    const by = (id) => document.getElementById(id);
    for (const number of t.steps) {
      put("step", element("option", { value: number }, number === t.typical ? `${number} (typical)` : String(number)));
    }
    by("step").addEventListener("change", (e) => showStep(Number(e.target.value)));
    by("zoom-in").addEventListener("click", () => zoom(0.5));
    by("zoom-out").addEventListener("click", () => zoom(2));
    by("zoom-all").addEventListener("click", () => show(0, last));
    by("show-path").addEventListener("change", (e) => { view.path = e.target.checked; draw(); });
    by("find").addEventListener("input", (e) => { view.find = e.target.value.trim(); draw(); });
    canvas.addEventListener("keydown", keyboard);
    window.addEventListener("resize", draw);
    if (t.steps.length < t.of.length) {
      by("timeline-head").textContent = `Timeline of steps ${t.steps[0]} to ${t.steps[t.steps.length - 1]} `
        + `(${t.steps.length} of ${t.of.length}: more do not fit into a page)`;
    }
  }

  function begin() {
    legend();
    controls();
    pointer();
    const shown = t.typical !== null && t.steps.includes(t.typical) && !data.fault ? t.typical : t.steps[t.steps.length - 1];
    document.getElementById("step").value = String(shown);
    if (count) showStep(shown); else draw();
  }

  return {
    begin, select, view, events, count, idOf, byId: (id) => ids.get(id),
    nameOf: (id) => ids.has(id) ? nameAt(ids.get(id)) : id,
    // The middle of a record on the canvas, in pixels: of its work, or of all of it.
    place: (i) => {
      const from = x(events.start[i] + events.first_data[i]), to = x(end(i));
      return { x: (Math.max(from, LEFT) + Math.min(to, width())) / 2, y: y(events.row[i]) + ROW / 2 };
    },
    neighbours, showStep, show,
  };
})();

(() => {
  document.title = `${data.title}: timeline`;
  put("title", data.title);
  data.facts.forEach(([name, value], i) => put("facts", i ? " · " : "", element("b", {}, `${name} `), value));
  if (data.fault) {
    document.getElementById("fault").hidden = false;
    put("fault", `The recording ended with a fault. ${data.fault}`);
  }
  for (const note of data.notes) put("notes", element("li", {}, note));
  if (data.analysis) showAnalysis(data.analysis);
  else document.querySelectorAll("[data-analysis]").forEach((section) => section.remove());
  document.querySelectorAll("h2").forEach((head, i) => {
    head.id ||= `part-${i}`;
    put("contents", element("a", { href: `#${head.id}` }, head.textContent));
  });
  picture.begin();
})();

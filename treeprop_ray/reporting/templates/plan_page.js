// Sliders, table and drawings of a plan; all figures come from `answer` (plan_model.js).

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const COLOURS = {open: "stem", close: "stem", lift: "forward", answer: "answer", predict: "answer",
                 head: "head", hint: "head", backward: "backward"};
const MOST_LABELS = 40, MOST_BARS = 20000;

const sorted = (list, also) => [...new Set([...list, also])].sort((p, q) => p - q);
const range = (a, b) => Array.from({length: Math.max(0, b - a + 1)}, (_, i) => a + i);
const blockSteps = sorted([.1, .2, .5, 1, 2, 5, 10, 20, 50, 100, 200, 500], data.block_ms);
const SLIDERS = {
  N: ["blocks N", () => sorted([2, 3, 4, 5, 6, 7, 8, 10, 13, 16, 20, 25, 32, 37, 48, 64, 96, 128, 256], data.N), v => v],
  hosts: ["hosts", () => range(1, linesOf(makeTree(at.N, data.split)).length), v => v],
  replicas: ["replicas", () => COPIES.filter(R => R <= data.batch), v => v],
  pieces: ["micro-batches", () => PIECES.filter(m => m * at.replicas <= data.batch), v => v],
  block: ["block forward", () => blockSteps, v => short(v) + " ms"],
  hop: ["Ray hop", () => sorted([0, .1, .2, .5, 1, 2, 5, 10, 20], data.hop_ms), v => short(v) + " ms"],
};
const at = {N: data.N, hosts: data.hosts, replicas: data.replicas, pieces: data.pieces,
            block: data.block_ms, hop: data.hop_ms};

function short(x) {
  return x === 0 ? "0" : x >= 100 ? x.toFixed(0) : x >= 10 ? x.toFixed(1) : Number(x.toPrecision(3)).toString();
}
const time = s => s >= 1 ? short(s) + " s" : short(1000 * s) + " ms";
const bytes = b => b >= 1e9 ? short(b / 1e9) + " GB" : b >= 1e6 ? short(b / 1e6) + " MB" : short(b / 1e3) + " kB";
const many = (n, what) => n + " " + what + (n === 1 ? "" : "s");

function element(name, attributes, parent, text) {
  const made = document.createElementNS(name === "div" ? null : SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

// -- sliders ------------------------------------------------------------------------------------------

const inputs = {};
for (const key in SLIDERS) {
  const label = document.createElement("label");
  const name = document.createElement("span"), input = document.createElement("input");
  const value = document.createElement("b");
  name.textContent = SLIDERS[key][0];
  input.type = "range"; input.min = 0; input.step = 1; input.id = "slider-" + key;
  input.addEventListener("input", () => { at[key] = SLIDERS[key][1]()[input.value]; later(); });
  label.append(name, input, value);
  document.getElementById("sliders").append(label);
  inputs[key] = {input, value};
}

function settle() {  // what one slider allows depends on others
  for (const key in SLIDERS) {
    const values = SLIDERS[key][1]();
    let index = values.indexOf(at[key]);
    if (index < 0) {
      index = values.filter(v => v <= at[key]).length - 1;
      at[key] = values[Math.max(0, index)];
    }
    inputs[key].input.max = values.length - 1;
    inputs[key].input.value = Math.max(0, index);
    inputs[key].value.textContent = SLIDERS[key][2](at[key]);
  }
}

// -- the table ------------------------------------------------------------------------------------------

function layoutOf(way, c) {
  if (way === "data parallel") return many(c.copies, "replica") + (c.pieces > 1 ? ", m = " + c.pieces : "");
  return many(c.hosts, way === "tree" ? "host" : "stage")
    + (c.copies > 1 ? " × " + c.copies : "") + ", m = " + c.pieces;
}

function showTable(found) {
  const rows = Object.entries(found.ways), fits = rows.filter(([, c]) => c.memory <= found.memory);
  const won = fits.length ? fits.reduce((p, q) => q[1].seconds < p[1].seconds ? q : p) : null;
  const longest = Math.max(...rows.map(([, c]) => c.seconds));
  const body = document.getElementById("ways");
  body.replaceChildren(...rows.map(([way, c]) => {
    const row = document.createElement("tr");
    if (won && won[0] === way) row.className = "won";
    if (c.memory > found.memory) row.className = "full";
    const cells = [[way === "tree" ? "tree × replicas" : way], [time(c.seconds), "number"], ["", "bar"],
                   [bytes(c.memory), "number"], [bytes(c.moved), "number"], [layoutOf(way, c)]];
    for (const [text, kind] of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      if (kind) cell.className = kind;
      if (kind === "bar") {
        const bar = document.createElement("div");
        bar.style.width = 100 * c.seconds / longest + "%";
        cell.append(bar);
      }
      row.append(cell);
    }
    row.dataset.way = way;
    return row;
  }));
  document.getElementById("devices").textContent =
    `${many(found.devices, "device")}: hosts × replicas. A tree of ${at.N} blocks has work for `
    + `${linesOf(found.work.tree).length} at once.`;
  document.getElementById("verdict").textContent = verdict(won, found);
}

function verdict(won, found) {
  if (!won) return "Nothing fits into " + bytes(found.memory) + ": more devices or more micro-batches.";
  const tree = found.ways.tree.seconds, [way, c] = won;
  if (way === "tree") {
    const rest = Object.entries(found.ways).filter(([w, o]) => w !== "tree" && o.memory <= found.memory);
    if (!rest.length) return "Here only the tree fits.";
    return `Here the tree is fastest, ${short(Math.min(...rest.map(([, o]) => o.seconds)) / tree)} times as `
      + "fast as the best of the others.";
  }
  return `Here ${way} is fastest; the tree takes ${short(tree / c.seconds)} times as long.`;
}

// -- drawings -------------------------------------------------------------------------------------------

const hue = (h, count) => {  // all round the circle but for the orange of the head
  const turn = 210 + 315 * h / Math.max(1, count);
  return `hsl(${Math.round(turn < 375 ? turn : turn + 45) % 360} 62% 52%)`;
};

function showWaves(step) {
  const box = document.getElementById("waves"), width = 1120, left = 66, end = step.path || step.seconds;
  const hosts = step.hosts, row = Math.max(7, Math.min(26, 520 / hosts)), height = hosts * row + 28;
  const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  const x = s => left + (width - left - 8) * s / end;
  for (let h = 0; h < hosts; h++) {
    element("rect", {x: left, y: h * row, width: width - left - 8, height: row - 2, fill: "#eef2f6"}, svg);
    if (row >= 11) element("text", {x: left - 8, y: h * row + row / 2 + 3, "text-anchor": "end"}, svg, "host " + h);
  }
  let bars = 0;
  step.calls.forEach((call, k) => {
    let from = step.spans[k][0];
    for (const o of call.ops) {
      const seconds = step.opSeconds(o);
      if (!seconds || !COLOURS[o.verb]) { from += seconds; continue; }
      if (bars++ < MOST_BARS) {
        const wide = Math.max(.6, x(from + seconds) - x(from) - .4);
        const bar = element("rect", {x: x(from), y: call.host * row, width: wide, height: row - 2, rx: 1.5,
          fill: `var(--${COLOURS[o.verb]})`, "fill-opacity": call.piece % 2 ? .72 : 1}, svg);
        const what = ["open", "close"].includes(o.verb) ? "stem" : `node ${o.n}, ${o.verb}`;
        element("title", {}, bar, `${what}, micro-batch ${call.piece + 1}: ${time(from)} to ${time(from + seconds)}`);
        if (wide > 24 && row > 14 && o.n)
          element("text", {x: x(from) + wide / 2, y: call.host * row + row / 2 + 3, "text-anchor": "middle",
            style: "fill:#fff"}, svg, o.n);
      }
      from += seconds;
    }
  });
  step.exchanges.forEach((seconds, h) => {
    const from = step.path - step.exchange;
    const bar = element("rect", {x: x(from), y: h * row, width: Math.max(1, x(from + seconds) - x(from)),
      height: row - 2, rx: 1.5, fill: "var(--exchange)"}, svg);
    element("title", {}, bar, `gradients of host ${h} and its twins: ${time(seconds)}`);
  });
  for (let i = 0; i <= 5; i++)
    element("text", {x: x(end * i / 5), y: height - 6, "text-anchor": i === 5 ? "end" : "middle"}, svg, time(end * i / 5));
  box.replaceChildren(svg);
  document.getElementById("driver").textContent = step.driver <= step.path ? "" :
    `The waves take ${time(step.path)}, but the driver takes ${time(step.driver)} to submit their calls: that is the step.`;
}

function showTree(found) {
  const tree = found.work.tree, step = found.ways.tree, width = 1120, gap = 46, side = 66;
  const height = (tree.depth + 1) * gap + 30, N = tree.N, few = N <= MOST_LABELS;
  const svg = element("svg", {viewBox: `0 0 ${width} ${height}`, role: "img"});
  const x = n => side + (width - side - 20) * n / N, y = s => 18 + (s - 1) * gap;
  for (let s = 1; s <= tree.depth; s++)
    element("text", {x: 8, y: y(s) + 4}, svg, "level " + s);
  const line = (a, b, s, colour, wide) => element("line", {x1: x(a), x2: x(b), y1: y(s), y2: y(s),
    stroke: colour, "stroke-width": wide}, svg);
  for (const v of tree.nodes) {
    const colour = hue(step.hostOf.get(v.n), step.hosts);
    line(v.l, v.n, v.level, colour, 4);
    line(v.n, v.r, v.level, v.spine ? "var(--head)" : colour, v.spine ? 4 : 2.5);
    for (const child of [v.a, v.b])
      if (child) element("line", {x1: x(v.n), y1: y(v.level), x2: x(child.n), y2: y(child.level),
        stroke: "#c5ced8", "stroke-dasharray": "2 3"}, svg);
  }
  for (const v of tree.nodes) {
    const dot = element("circle", {cx: x(v.n), cy: y(v.level), r: few ? 11 : 4, fill: hue(step.hostOf.get(v.n), step.hosts),
      stroke: "#fff", "stroke-width": 1.5}, svg);
    element("title", {}, dot, `node ${v.n}, level ${v.level}, host ${step.hostOf.get(v.n)}: blocks ${v.l}→${v.n}, ${v.n}→${v.r}`);
    if (few) element("text", {x: x(v.n), y: y(v.level) + 4, "text-anchor": "middle", style: "fill:#fff;font-weight:600"}, svg, v.n);
  }
  const base = tree.depth + 1;
  element("text", {x: 8, y: y(base) + 4}, svg, "chain");
  for (let n = 0; n < N; n++) line(n, n + 1, base, n === N - 1 ? "var(--head)" : "#8a97a5", 3);
  for (let n = 0; n <= N; n++) {
    element("circle", {cx: x(n), cy: y(base), r: few ? 4 : 1.5, fill: "#5d6b7a"}, svg);
    if (few) element("text", {x: x(n), y: y(base) + 20, "text-anchor": "middle"}, svg, n);
  }
  document.getElementById("tree").replaceChildren(svg);
  const names = range(0, Math.min(step.hosts, 24) - 1).map(h => {
    const item = document.createElement("span"), dot = document.createElement("i");
    dot.style.background = hue(h, step.hosts);
    item.append(dot, "host " + h);
    return item;
  });
  const head = document.createElement("span"), dot = document.createElement("i");
  dot.style.background = "var(--head)";
  head.append(dot, "every line that ends at N is the head, on host 0");
  const more = step.hosts > names.length ? [`and ${step.hosts - names.length} more`] : [];
  document.getElementById("hosts").replaceChildren(...names, ...more, head);
}

let waiting = 0;
function later() { settle(); cancelAnimationFrame(waiting); waiting = requestAnimationFrame(show); }

function show() {
  const found = answer(data, at);
  showTable(found);
  showWaves(found.ways.tree);
  showTree(found);
}

settle();
show();

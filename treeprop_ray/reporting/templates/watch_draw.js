// Drawings: SVG made of plain numbers; text is set as text, never as markup.
"use strict";
const $ = id => document.getElementById(id);
const COLORS = ["#3056d3", "#e07a1f", "#12966b", "#c43d6b", "#7a5af5", "#0e8fb3", "#8a6d1f", "#64748b"];

function make(tag, attributes = {}, text = "") {
  const drawn = ["svg", "g", "line", "rect", "circle", "path", "text", "title", "polyline"].includes(tag);
  const element = drawn ? document.createElementNS("http://www.w3.org/2000/svg", tag)
                        : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== "") element.textContent = text;
  return element;
}
function fill(id, ...children) { $(id).replaceChildren(...children); }
function nothing(id, text) { fill(id, make("p", {class: "empty"}, text)); }

function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}
function clock(seconds) {
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
  const s = String(whole % 60).padStart(2, "0");
  return h ? `${h}:${String(m).padStart(2, "0")}:${s}` : `${m}:${s}`;
}
function legend(entries) {
  const box = make("div", {class: "legend"});
  for (const [color, text] of entries) {
    const item = make("span"), dot = make("i");
    dot.style.background = color;
    item.append(dot, text);
    box.append(item);
  }
  return box;
}

// pale to dark red, by the logarithm: losses of nodes differ by orders of magnitude
const STOPS = [[255, 243, 219], [253, 190, 133], [240, 101, 67], [170, 20, 36], [85, 0, 25]];
function heat(share) {
  const at = Math.min(Math.max(share, 0), 1) * (STOPS.length - 1), k = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[k].map((low, i) => Math.round(low + (at - k) * (STOPS[k + 1][i] - low)));
}
const rgb = parts => `rgb(${parts.join(",")})`;
const dark = ([r, g, b]) => 0.3 * r + 0.6 * g + 0.1 * b < 140;

function stride(low, high, most) {  // 1, 2 or 5 times a power of ten, at most so many of them
  const rough = Math.max((high - low) / most, 1e-12), power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map(k => k * power).find(s => s >= 0.999 * rough);
}
function ticks(low, high, most) {
  const step = stride(low, high, most), first = Math.ceil(low / step - 1e-6);
  const count = Math.floor(high / step + 1e-6) - first + 1;
  return Array.from({length: Math.max(0, count)}, (_, k) => Number(((first + k) * step).toPrecision(12)));
}

function chart(series, {show = short, low = null, high = null, label = "step", dots = false} = {}) {
  const W = 560, H = 210, L = 52, R = 12, T = 10, B = 26;
  const points = series.flatMap(s => s.points.filter(p => p[1] !== null && p[1] !== undefined));
  const xs = points.map(p => p[0]), ys = points.map(p => p[1]);
  const least = (a, first) => a.reduce((m, v) => Math.min(m, v), first);
  const most = (a, first) => a.reduce((m, v) => Math.max(m, v), first);
  const x0 = least(xs, Infinity), x1 = Math.max(most(xs, -Infinity), x0 + 1);
  let y0 = low === null ? least(ys, Infinity) : Math.min(low, least(ys, Infinity));
  let y1 = high === null ? most(ys, -Infinity) : Math.max(high, most(ys, -Infinity));
  if (y1 - y0 < 1e-12) { y0 -= 0.5; y1 += 0.5; }
  const unit = stride(y0, y1, 5);
  y0 = unit * Math.floor(y0 / unit + 1e-6);
  y1 = unit * Math.ceil(y1 / unit - 1e-6);
  const x = v => L + (v - x0) / (x1 - x0) * (W - L - R), y = v => T + (y1 - v) / (y1 - y0) * (H - T - B);
  const svg = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img"});
  for (const v of ticks(y0, y1, 6))
    svg.append(make("line", {x1: L, x2: W - R, y1: y(v), y2: y(v), class: "grid"}),
               make("text", {x: L - 6, y: y(v) + 4, "text-anchor": "end"}, show(v)));
  for (const v of ticks(x0, x1, 6))
    if (Number.isInteger(v) && x(v) < W - R - 80)  // the last one has a word before it
      svg.append(make("text", {x: x(v), y: H - 8, "text-anchor": "middle"}, v));
  svg.append(make("text", {x: W - R, y: H - 8, "text-anchor": "end"}, `${label} ${x1}`));
  for (const s of series) {
    const known = s.points.filter(p => p[1] !== null && p[1] !== undefined);
    svg.append(make("polyline", {points: known.map(p => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" "),
      fill: "none", stroke: s.color, "stroke-width": s.width ?? 1.8, "stroke-linejoin": "round"}));
    if (dots || known.length === 1)
      for (const p of known) svg.append(make("circle", {cx: x(p[0]), cy: y(p[1]), r: 2.4, fill: s.color}));
  }
  return svg;
}

function drawTree(nodes, N, places) {
  const levels = Math.max(...nodes.map(n => n[3])), W = 1160, L = 60, R = 50, row = 56, T = 26;
  const H = T + row * levels + 34, x = n => L + n / N * (W - L - R), y = s => T + row * (s - 1) + 14;
  const unit = (W - L - R) / N, size = Math.max(3, Math.min(15, unit * 0.34));
  const losses = nodes.map(n => places[n[0]]?.loss).filter(v => v > 0).map(Math.log);
  const low = losses.length ? Math.min(...losses) : 0, high = losses.length ? Math.max(...losses) : 1;
  const share = loss => loss > 0 && high > low ? (Math.log(loss) - low) / (high - low) : 0;
  const svg = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", id: "tree-picture"});
  for (const s of Array.from({length: levels}, (_, k) => k + 1))
    svg.append(make("text", {x: 4, y: y(s) + 4}, `level ${s}`));
  const every = Math.ceil(N / 32);
  for (let n = 0; n <= N; n++) {
    const top = nodes.find(node => node[0] === n)?.[3] ?? 1;
    svg.append(make("line", {x1: x(n), x2: x(n), y1: y(top), y2: H - 24, class: "grid", "stroke-dasharray": "2 4"}));
    if (n % every === 0 || n === N)
      svg.append(make("text", {x: x(n), y: H - 8, "text-anchor": "middle"}, n === N ? `head ${n}` : n));
  }
  for (const [n, l, r, s] of nodes) {
    const terms = places[n] ?? {}, known = terms.loss !== undefined && terms.loss !== null;
    const parts = known ? heat(share(terms.loss)) : [228, 231, 236], g = make("g", {"data-node": n});
    const about = Object.entries(terms).map(([k, v]) => `${k} ${short(v, 4)}`).join(", ");
    g.append(make("title", {}, `node ${n} of level ${s}, between ${l} and ${r}: ${about || "no loss yet"}`));
    const line = {y1: y(s), y2: y(s), stroke: rgb(parts), "stroke-width": Math.min(9, size), "stroke-linecap": "round"};
    g.append(make("line", {x1: x(l) + size * 0.7, x2: x(r) - size * 0.7, ...line}),
             make("circle", {cx: x(n), cy: y(s), r: size, fill: rgb(parts), stroke: "#8a5a44", "stroke-width": 1}));
    if (size > 8) {
      const number = make("text", {x: x(n), y: y(s) + 4, "text-anchor": "middle", class: "strong"}, n);
      number.style.fill = dark(parts) ? "#fff" : "#1d2433";
      g.append(number);
    }
    if (unit > 46 && known)
      g.append(make("text", {x: x(n), y: y(s) + size + 13, "text-anchor": "middle"}, short(terms.loss)));
    svg.append(g);
  }
  const scale = make("span"), bar = make("i");
  bar.style.cssText = `width:140px;background:linear-gradient(90deg,${STOPS.map(rgb).join(",")})`;
  scale.append(`${short(Math.exp(low))} `, bar, ` ${short(Math.exp(high))}   (logarithmic; point at a node for its terms)`);
  const box = make("div", {class: "legend"});
  box.append(scale);
  return [svg, box];
}

function drawBars(entries, {low = 0, high = null, show = short} = {}) {
  const W = 560, row = 20, L = 74, R = 60, H = row * entries.length + 4;
  const values = entries.map(e => e[1]).filter(v => v !== null);
  const y1 = high ?? Math.max(...values, 1e-12), y0 = Math.min(low, ...values);
  const x = v => L + (v - y0) / (y1 - y0) * (W - L - R);
  const svg = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img"});
  entries.forEach(([name, value], k) => {
    const top = k * row;
    svg.append(make("text", {x: L - 8, y: top + 14, "text-anchor": "end"}, name));
    if (value === null) return;
    svg.append(make("rect", {x: Math.min(x(0), x(value)), y: top + 4, height: row - 7, rx: 2,
      width: Math.max(1, Math.abs(x(value) - x(0))), fill: value < 0 ? "#c43d6b" : "#3056d3"}),
      make("text", {x: Math.max(x(0), x(value)) + 6, y: top + 14}, show(value)));
  });
  svg.append(make("line", {x1: x(0), x2: x(0), y1: 0, y2: H, class: "grid"}));
  return svg;
}

function drawWaves(waves) {
  const W = 1160, L = 96, R = 14, row = waves.actors.length > 40 ? 12 : 26, H = row * waves.actors.length + 30;
  const end = Math.max(1e-6, ...waves.actors.flatMap(a => a.calls.map(c => c[2] + c[3])));
  const x = t => L + t / end * (W - L - R), svg = make("svg", {viewBox: `0 0 ${W} ${H}`, role: "img", id: "waves-picture"});
  for (const t of ticks(0, end, 8))
    svg.append(make("line", {x1: x(t), x2: x(t), y1: 0, y2: H - 24, class: "grid"}),
               make("text", {x: x(t), y: H - 8, "text-anchor": x(t) > W - R - 20 ? "end" : "middle"}, `${short(t)} ms`));
  const used = new Set();
  waves.actors.forEach((actor, k) => {
    svg.append(make("text", {x: L - 8, y: k * row + row / 2 + 4, "text-anchor": "end"}, actor.name));
    for (const [phase, level, begin, width] of actor.calls) {
      used.add(phase);
      const w = Math.max(1.2, x(begin + width) - x(begin));
      const box = make("rect", {x: x(begin), y: k * row + 3, width: w, height: row - 6, rx: 2,
                                fill: waves.colors[phase] ?? "#7f7f7f"});
      box.append(make("title", {}, `${phase}, level ${level}: ${short(width)} ms`));
      svg.append(box);
      if (w > 12 && row > 20) {
        const text = make("text", {x: x(begin) + w / 2, y: k * row + row / 2 + 4, "text-anchor": "middle"}, level);
        text.style.fill = "#fff";
        svg.append(text);
      }
    }
  });
  return [svg, legend([...used].map(p => [waves.colors[p] ?? "#7f7f7f", p.replace("_", " ")]))];
}

// The formulas of treeprop_ray/schedule (tree, placement, gather, ops, pricing, steps, planner) once more,
// so that the sliders can ask them; tests/reporting/test_plan_page.py holds the two together.
"use strict";

const SPLITS = {
  floor: (l, r) => Math.floor((l + r) / 2),
  right_full: (l, r) => r - 2 ** (Math.floor(Math.log2(r - l - 1)) ),
};

function makeTree(N, split) {
  const nodes = [], stack = [[0, N, 1]];
  while (stack.length) {
    const [l, r, level] = stack.pop();
    if (r - l < 2) continue;
    const n = SPLITS[split](l, r);
    nodes.push({n, l, r, level, leaf: r - l === 2, spine: r === N});
    stack.push([l, n, level + 1], [n, r, level + 1]);
  }
  nodes.sort((a, b) => a.n - b.n);
  const at = new Map(nodes.map(v => [v.l + "-" + v.r, v]));
  for (const v of nodes) {
    v.a = at.get(v.l + "-" + v.n) || null;  // left child
    v.b = at.get(v.n + "-" + v.r) || null;  // right child
    if (v.a) v.a.parent = v.n;
    if (v.b) v.b.parent = v.n;
  }
  const depth = Math.max(...nodes.map(v => v.level));
  const level = s => nodes.filter(v => v.level === s);
  return {N, nodes, depth, level, root: at.get("0-" + N),
          spine: nodes.filter(v => v.spine).sort((a, b) => a.level - b.level)};
}

// -- placement --------------------------------------------------------------------------------------

function linesOf(tree) {
  const found = [tree.spine], taken = new Set(tree.spine.map(v => v.n));
  for (let s = 1; s <= tree.depth; s++) {
    for (const top of tree.level(s)) {
      if (taken.has(top.n)) continue;
      const line = [];
      for (let v = top; v; v = v.a || v.b) line.push(v);
      line.forEach(v => taken.add(v.n));
      found.push(line);
    }
  }
  return found;
}

function pack(tree, hosts) {
  const zeros = () => Array(tree.depth + 1).fill(0);
  const load = Array.from({length: hosts}, zeros), busiest = zeros(), hostOf = new Map();
  const cost = v => v.spine ? 1 : 2, sum = list => list.reduce((a, b) => a + b, 0);
  const put = (line, host) => {
    for (const v of line) { load[host][v.level] += cost(v); hostOf.set(v.n, host); }
    load[host].forEach((x, s) => { busiest[s] = Math.max(busiest[s], x); });
  };
  const spanWith = (line, host) => {
    const grown = load[host].slice();
    for (const v of line) grown[v.level] += cost(v);
    return [sum(grown.map((x, s) => Math.max(x, busiest[s]))), sum(load[host])];
  };
  const [first, ...rest] = linesOf(tree);
  put(first, 0);
  rest.sort((p, q) => q.length - p.length || p[0].level - q[0].level);
  while (rest.length) {
    let equal = rest.findIndex(x => x.length !== rest[0].length || x[0].level !== rest[0][0].level);
    const left = rest.splice(0, equal < 0 ? rest.length : equal);
    while (left.length) {
      const kin = new Map();
      for (const line of left.slice().reverse()) kin.set(hostOf.get(line[0].parent), line);
      let best = null, host = 0;
      for (let h = 0; h < hosts; h++) {
        const key = [...spanWith(left[0], h), kin.has(h) ? 0 : 1];
        if (!best || less(key, best)) { best = key; host = h; }
      }
      const line = kin.get(host) || left[0];
      left.splice(left.indexOf(line), 1);
      put(line, host);
    }
  }
  return hostOf;
}

function less(p, q) {
  for (let i = 0; i < p.length; i++) if (p[i] !== q[i]) return p[i] < q[i];
  return false;
}

// -- the waves (schedule/tree.py, packed: the spine lives with the head) ----------------------------------

function ruleOf(rule) {
  const ce = v => v.spine && (v.leaf || rule.objective === "node_all_ce") ? rule.ce : 0;
  const right = v => v.spine ? ce(v)
    : rule.objective === "final_ce" ? 0
    : rule.levels === "all" || v.r - v.n === 1 ? rule.right : 0;
  return {
    right,
    asks: v => v.spine && (rule.beta > 0 || ce(v) > 0),
    atSample: v => (v.spine ? rule.ce_at : rule.input) === "sample" && right(v) > 0,
    sendsLeft: v => v.l === 0 ? true : !rule.detach_levels,
    sendsRight: (v, N) => v.r < N && rule.target_gradient && !rule.detach_levels,
  };
}

const op = (verb, n, reads = [], writes = []) => ({verb, n, reads, writes});

function phasesOf(tree, rule) {
  const R = ruleOf(rule), out = new Map();
  const told = n => rule.beta > 0 && rule.by_product ? ["g" + n, "k" + n] : ["g" + n];
  const up = v => [...(R.sendsLeft(v) ? ["l" + v.n] : []),
                   ...(R.sendsRight(v, tree.N) ? ["r" + v.n] : [])];
  const awaits = v => [v.a, v.b].filter(Boolean).flatMap(up);
  const root = tree.root, close = [op("close", 0, ["l" + root.n])];
  const closesWithRoot = awaits(root).length > 0 || root.leaf;
  for (const v of tree.nodes) {
    const n = v.n, lift = op("lift", n, ["z" + v.l], ["mu" + n]), settle = op("settle", n, [], ["z" + n]);
    const back = [op("backward", n, awaits(v), up(v)), ...(v === root && closesWithRoot ? close : [])];
    const later = awaits(v).length ? back : [], now = later.length ? [] : back;
    const made = {forward: [], aside: [], backward: later};
    if (!v.spine) {
      const answer = op("answer", n, ["z" + v.r]);
      if (R.atSample(v)) {
        const predict = op("predict", n, ["z" + n, "z" + v.r]);
        const first = rule.beta > 0 ? [lift, answer, settle] : [lift, settle];
        if (later.length) { made.forward = first; made.aside = [predict]; }
        else made.forward = [...first, predict, ...now];
      } else if (rule.beta === 0 && later.length) {
        made.forward = [lift, settle]; made.aside = [answer];
      } else made.forward = [lift, answer, settle, ...now];
    } else if (!R.asks(v)) {
      made.forward = [lift, settle, ...now];
    } else if (R.atSample(v)) {
      const head = op("head", n, ["z" + n], ["h" + n]), hear = op("hear", n, ["h" + n]);
      const hint = op("hint", n, ["mu" + n], told(n)), receive = op("receive", n, told(n));
      made.forward = rule.beta === 0 ? [lift, settle, head, hear, ...now]
        : [lift, hint, receive, settle, head, hear, ...now];
    } else {
      const head = op("head", n, ["mu" + n], told(n)), receive = op("receive", n, told(n));
      made.forward = [lift, head, receive, settle, ...now];
    }
    out.set(n, made);
  }
  return {of: out, close, closesWithRoot};
}

function onePiece(tree, rule, hostOf) {
  const flow = phasesOf(tree, rule), D = tree.depth, waves = [];
  const stemAlone = tree.nodes.some(v => v.l === 0 && hostOf.get(v.n) !== 0);
  const wave = (clock, phase, level, rows) => {
    const byHost = new Map();
    for (const [host, ops] of rows)
      if (ops.length) byHost.set(host, [...(byHost.get(host) || []), ...ops]);
    if (byHost.size)
      waves.push({clock, phase, level, byHost: new Map([...byHost].sort((p, q) => p[0] - q[0]))});
  };
  const open = [op("open", 0, [], ["z0"])];
  const late = new Set(tree.level(D).map(v => hostOf.get(v.n)));
  let aside = [], clock = 0;
  if (stemAlone) wave(0, "stem", 0, [[0, open]]);
  for (let s = 1; s <= D; s++) {
    const rows = tree.level(s).map(v => [hostOf.get(v.n), flow.of.get(v.n)]);
    const opening = s === 1 && !stemAlone ? [[0, open]] : [];
    aside = aside.concat(rows.filter(([h]) => late.has(h)).map(([h, o]) => [h, o.aside]));
    const forward = rows.map(([h, o]) => [h, o.forward]);
    wave(3 * s - 2, "forward", s, [...opening, ...forward, ...(s === D ? aside : [])]);
    wave(3 * s, "aside", s, rows.filter(([h]) => !late.has(h)).map(([h, o]) => [h, o.aside]));
  }
  for (let s = D; s >= 1; s--) {
    clock = 3 * (2 * D - Math.min(s, D - 1)) - 2;
    wave(clock, "backward", s, tree.level(s).map(v => [hostOf.get(v.n), flow.of.get(v.n).backward]));
  }
  if (!flow.closesWithRoot) wave(clock, "stem_backward", 0, [[0, flow.close]]);
  return makeCalls(gather(waves));
}

function readersOf(waves) {
  const readers = new Map();
  for (const w of waves)
    for (const [host, ops] of w.byHost)
      for (const o of ops)
        for (const name of o.reads) {
          if (!readers.has(name)) readers.set(name, new Set());
          readers.get(name).add(host);
        }
  return readers;
}

const FIXED = ["head", "close", "share", "collect"];

function gather(waves) {
  const readers = readersOf(waves), before = new Map(), held = new Map(), out = [];
  const elsewhere = (name, host) => [...(readers.get(name) || [])].some(h => h !== host);
  for (const w of waves) {
    const kept = new Map();
    for (const [host, ops] of w.byHost) {
      const call = before.get(host);
      if (!held.has(host)) held.set(host, new Set());
      const have = held.get(host), stay = [];
      const goesOn = call && !call.some(o => o.writes.some(name => elsewhere(name, host)));
      for (let i = 0; i < ops.length;) {
        let j = i;
        while (j < ops.length && ops[j].n === ops[i].n) j++;
        const mine = ops.slice(i, j), made = mine.flatMap(o => o.writes);
        const here = mine.every(o => o.reads.every(name => have.has(name) || made.includes(name)));
        const free = !mine.some(o => FIXED.some(verb => o.verb.startsWith(verb)));
        if (goesOn && here && free) { call.push(...mine); made.forEach(name => have.add(name)); }
        else stay.push(...mine);
        i = j;
      }
      if (stay.length) {
        kept.set(host, stay); before.set(host, stay);
        stay.forEach(o => [...o.reads, ...o.writes].forEach(name => have.add(name)));
      }
    }
    if (kept.size) out.push({...w, byHost: kept});
  }
  return out;
}

function makeCalls(waves) {
  const readers = readersOf(waves), maker = new Map(), fellows = new Map(), arrived = new Set();
  for (const w of waves)
    for (const [host, ops] of w.byHost) for (const o of ops) o.writes.forEach(x => maker.set(x, host));
  return waves.map(w => ({clock: w.clock, calls: [...w.byHost].map(([host, ops]) => {
    const inputs = [], groups = new Map();
    for (const name of new Set(ops.flatMap(o => o.reads)))
      if (maker.get(name) !== host && !arrived.has(host + " " + name)) {
        inputs.push(name);
        fellows.get(name).forEach(x => arrived.add(host + " " + x));
      }
    for (const name of ops.flatMap(o => o.writes)) {
      const others = [...(readers.get(name) || [])].filter(h => h !== host).sort((p, q) => p - q);
      if (!others.length) continue;
      const key = others.join();
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(name);
    }
    const packets = [...groups.values()];
    packets.forEach(packet => packet.forEach(name => fellows.set(name, packet)));
    return {phase: w.phase, level: w.level, host, ops, inputs, packets};
  })}));
}

function interleave(waves, pieces, stride) {
  const keyed = [];
  for (let m = 0; m < pieces; m++)
    for (const w of waves) for (const call of w.calls) keyed.push([w.clock + stride * m, m, call]);
  keyed.sort((p, q) => p[0] - q[0] || p[1] - q[1]);
  return keyed.map(([, piece, call]) => ({...call, piece}));
}

// -- prices (schedule/pricing.py, steps.py) -----------------------------------------------------------------

function price(calls, hosts, cost, each, link, ray) {
  const free = Array(hosts).fill(0), out = Array(hosts).fill(0), there = new Map(), spans = [];
  let moved = 0;
  calls.forEach((call, k) => {
    let came = 0;
    for (const name of call.inputs) came = Math.max(came, there.get(call.piece + " " + name));
    const begin = Math.max((k + 1) * ray.submit, free[call.host], came + ray.hop);
    const end = free[call.host] = begin + cost(call);
    spans.push([begin, end]);
    for (const packet of call.packets) {
      const load = packet.reduce((sum, name) => sum + each(name), 0);
      out[call.host] = Math.max(out[call.host], end) + load / link.bandwidth;
      packet.forEach(name => there.set(call.piece + " " + name, out[call.host] + link.latency));
      moved += load;
    }
  });
  const path = Math.max(...free), driver = ray.submit * (calls.length + hosts);
  return {seconds: Math.max(path, driver), path, driver, moved, spans};
}

function exchanged(step, copies, hosts, sums, link, ray) {
  if (copies === 1) return step;
  const share = 2 * (copies - 1) / copies * 4, total = sums.reduce((p, q) => p + q, 0);
  const exchange = share * Math.max(...sums) / link.bandwidth + 2 * (link.latency + ray.hop);
  const driver = copies * (step.driver + 2 * ray.submit * hosts), path = step.path + exchange;
  return {...step, seconds: Math.max(path, driver), path, driver, exchange,
          moved: copies * (step.moved + share * total)};
}

const TRAIN_BYTES = 16, BACKWARD = 2;
const forward = (part, samples) => part.fixed + part.each * samples;

function forwardsOf(work, rule) {
  const R = ruleOf(rule), nodes = new Map(work.tree.nodes.map(v => [v.n, v]));
  return o => {
    if (o.verb === "head" || o.verb === "hint") return [1 + BACKWARD, work.head];
    if (o.verb === "open") return [1, work.stem];
    if (o.verb === "close") return [BACKWARD, work.stem];
    if (o.verb === "answer" || o.verb === "predict") {
      const v = nodes.get(o.n), asked = rule.beta > 0 || R.right(v) > 0;
      return [asked ? 1 + BACKWARD : 0, v.r === work.tree.N ? work.head : work.block];
    }
    if (o.verb === "lift") return [1, work.block];
    if (o.verb === "backward") return [BACKWARD, work.block];
    return [0, work.stem];
  };
}

// A tree of equal blocks: `hosts` of each of `copies` copies, `pieces` micro-batches of a copy.
function treeStep(work, hosts, copies, pieces, link, ray) {
  const tree = work.tree, batch = Math.floor(work.batch / copies), samples = batch / pieces;
  const hostOf = pack(tree, hosts), count = Math.max(0, ...hostOf.values()) + 1;
  const calls = interleave(onePiece(tree, work.rule, hostOf), pieces, 3);
  const worth = forwardsOf(work, work.rule), mc = work.rule.mc_samples;
  const opSeconds = o => { const [n, part] = worth(o); return mc * n * forward(part, samples); };
  const each = work.state * samples * mc;
  const step = price(calls, count, c => c.ops.reduce((sum, o) => sum + opSeconds(o), 0),
                     () => each, link, ray);
  const used = [...new Set([0, ...hostOf.values()])].sort((p, q) => p - q);
  const held = new Map(used.map(h => [h, 0])), memory = new Map(held);
  held.set(0, work.head.parameters + work.stem.parameters);
  for (const v of tree.nodes)
    held.set(hostOf.get(v.n), held.get(hostOf.get(v.n)) + (v.spine ? 1 : 2) * work.block.parameters);
  const alive = Math.min(pieces, 2 * tree.depth) * samples * mc;
  for (const h of used) memory.set(h, TRAIN_BYTES * held.get(h));
  for (const v of tree.nodes)
    if (!v.leaf) memory.set(hostOf.get(v.n), memory.get(hostOf.get(v.n)) + alive * work.block.graph);
  const done = exchanged(step, copies, used.length, [...held.values()], link, ray);
  const adds = n => 8 * (copies - 1) / copies * n / link.bandwidth + 2 * (link.latency + ray.hop);
  return {...done, hosts: used.length, copies, pieces, memory: Math.max(...memory.values()),
          calls, hostOf, opSeconds, exchanges: copies > 1 ? [...held.values()].map(adds) : []};
}

function stageParts(work, count) {
  const N = work.tree.N, bound = k => Math.floor(N * k / count), parts = [];
  for (let k = 0; k < count; k++) {
    const blocks = bound(k + 1) - bound(k) - (k === count - 1 ? 1 : 0);
    parts.push([...(k ? [] : [work.stem]), ...Array(blocks).fill(work.block),
                ...(k === count - 1 ? [work.head] : [])]);
  }
  return parts;
}

const total = (parts, value) => parts.reduce((sum, part) => sum + value(part), 0);

function chainCalls(count, pieces) {
  const last = count - 1, waves = [];
  for (let k = 0; k < count; k++) {
    const ops = [...(k ? [] : [op("open", 0, [], ["z0", "y", "k"])]),
                 op("ahead", k, ["z" + k], ["z" + (k + 1)])];
    if (k === last)
      ops.push(op("head", k, ["z" + (k + 1), "y", "k"], ["a" + (k + 1)]),
               op("back", k, ["a" + (k + 1)], ["a" + k]));
    waves.push({clock: k, phase: "forward", level: k, byHost: new Map([[k, ops]])});
  }
  for (let k = last - 1; k >= 0; k--)
    waves.push({clock: 2 * last - k, phase: "backward", level: k,
                byHost: new Map([[k, [op("back", k, ["a" + (k + 1)], ["a" + k])]]])});
  waves[waves.length - 1].byHost.get(0).push(op("close", 0, ["a0"]));
  return interleave(makeCalls(waves), pieces, 1);
}

function pipelineStep(work, devices, copies, pieces, link, way) {
  const count = Math.min(Math.floor(devices / copies), work.tree.N);
  const batch = Math.floor(work.batch / copies), samples = batch / pieces;
  const parts = stageParts(work, count), times = parts.map(p => total(p, x => forward(x, samples)));
  const state = work.state * samples, free = {hop: 0, submit: 0};
  let step;
  if (way === "zero bubble") {
    const hop = count > 1 ? link.latency + state / link.bandwidth : 0;
    const longest = Math.max(...times), whole = times.reduce((p, q) => p + q, 0);
    const full = 3 * pieces * longest + (whole - longest) / 2 + (count - 1) * hop;
    const few = 2 * whole + 2 * (pieces - 1) * longest + longest + 2 * (count - 1) * hop;
    const seconds = Math.max(full, few);
    step = {seconds, path: seconds, driver: 0, moved: 2 * (count - 1) * work.state * batch};
  } else {
    const passes = {ahead: 1, back: BACKWARD};
    const cost = c => c.ops.reduce((sum, o) => sum + (passes[o.verb] || 0), 0) * times[c.host];
    step = price(chainCalls(count, pieces), count, cost,
                 name => "za".includes(name[0]) ? state : 0, link, free);
  }
  const sums = parts.map(p => total(p, x => x.parameters));
  const memory = parts.map((p, k) => TRAIN_BYTES * sums[k]
    + Math.min(pieces, count - k) * samples * total(p, x => x.graph));
  return {...exchanged(step, copies, count, sums, link, free), way, hosts: count, copies, pieces,
          memory: Math.max(...memory)};
}

function dataParallel(work, devices, pieces, link) {
  const replicas = Math.min(devices, work.batch), samples = work.batch / replicas / pieces;
  const N = work.tree.N, all = f => f(work.stem) + (N - 1) * f(work.block) + f(work.head);
  const parameters = all(x => x.parameters);
  const compute = (1 + BACKWARD) * pieces * all(x => forward(x, samples));
  const exchange = 2 * (replicas - 1) / replicas * 4 * parameters / link.bandwidth;
  const seconds = compute + 0.5 * exchange + 2 * (replicas - 1) * link.latency;
  return {seconds, moved: 2 * (replicas - 1) * 4 * parameters, hosts: 1, copies: replicas, pieces,
          memory: TRAIN_BYTES * parameters + samples * all(x => x.graph)};
}

// -- the best of every way (planner.py) -----------------------------------------------------------------------

const PIECES = [1, 2, 4, 8, 16, 32, 64], COPIES = [1, 2, 4, 8, 16, 32, 64];

function best(candidates, memory) {
  return candidates.reduce((p, q) => {
    const [x, y] = [p, q].map(c => [c.memory > memory ? 1 : 0, c.seconds]);
    return less(y, x) ? q : p;
  });
}

function others(work, devices, link, memory) {
  const pipelines = way => {
    const most = Math.min(Math.floor(devices / (devices > 1 ? 2 : 1)), work.batch), made = [];
    for (const R of COPIES.filter(R => R <= most))
      for (const m of PIECES.filter(m => R * m <= work.batch))
        made.push(pipelineStep(work, devices, R, m, link, way));
    return best(made, memory);
  };
  const replicas = Math.min(devices, work.batch);
  const copies = PIECES.filter(m => replicas * m <= work.batch);
  return {"1F1B": pipelines("1F1B"), "zero bubble": pipelines("zero bubble"),
          "data parallel": best(copies.map(m => dataParallel(work, devices, m, link)), memory)};
}

// What the page shows for a position of the sliders: the tree as asked, the others on as many devices.
function answer(data, at) {
  const scale = at.block / data.block_ms;
  const timed = part => ({...part, fixed: part.fixed * scale, each: part.each * scale});
  const work = {tree: makeTree(at.N, data.split), rule: data.rule, batch: data.batch, state: data.state,
                block: timed(data.block), head: timed(data.head), stem: timed(data.stem)};
  const ray = {hop: at.hop / 1000, submit: data.submit};
  const memory = data.memory === null ? Infinity : data.memory;
  const tree = treeStep(work, at.hosts, at.replicas, at.pieces, data.link, ray);
  const devices = at.hosts * at.replicas;
  return {work, devices, memory, ways: {tree, ...others(work, devices, data.link, memory)}};
}

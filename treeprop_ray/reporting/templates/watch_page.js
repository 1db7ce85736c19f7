// Asks for how the run stands, again and again; an answer that does not come is asked for again.
const kept = {place: "", known: 0, mark: "", curve: [], scores: [], waves: null};
const STATES = {waiting: "waiting for the first step", running: "running", finished: "finished",
                stopped: "stopped", lost: "its process is gone"};

function scoreText(facts, value) {
  if (value === null || value === undefined) return "–";
  return (facts.score ?? "accuracy") === "accuracy" ? `${(100 * value).toFixed(2)} %` : short(value, 4);
}

function take(now) {
  if (now.anew) { kept.curve = []; kept.scores = []; }
  kept.curve.push(...now.curve);
  if (kept.curve.length > 4000) kept.curve = kept.curve.filter((_, k) => k % 2 === 1);
  kept.scores.push(...now.scores);
  Object.assign(kept, {place: now.place, known: now.known, mark: now.mark});
  if (now.waves) kept.waves = now.waves;
  if (!now.mark) kept.waves = null;
  show(now);
}

function show(now) {
  const facts = now.facts, last = now.last, steps = facts.steps ?? last.step ?? 0;
  $("subtitle").textContent = now.subtitle;
  $("state").textContent = STATES[now.state] ?? now.state;
  $("state").className = `state ${now.state}`;
  $("progress").style.width = steps ? `${100 * Math.min(1, (last.step ?? facts.step ?? 0) / steps)}%` : "0";
  showTiles(now, facts, last);
  showPlaces(facts, last);
  showScores(facts);
  const losses = kept.curve.map(p => [p[0], p[1]]);
  if (losses.length) fill("loss", chart([{color: COLORS[0], points: losses}])); else nothing("loss", "No step has been logged yet.");
  const samples = facts.step_samples, rates = kept.curve.filter(p => p[2] > 0).map(p => [p[0], samples / p[2]]);
  if (samples && rates.length) fill("pace", chart([{color: COLORS[5], points: rates}], {low: 0})); else nothing("pace", "Not known yet.");
  showProbe(now.probe);
  if (kept.waves && kept.waves.actors.length) {
    $("waves-step").textContent = `of step ${kept.waves.step + 1}: which actor worked when, with the level in the box`;
    fill("waves", ...drawWaves(kept.waves));
  } else nothing("waves", "Actors are timed with engine=ray; the timeline is written after an evaluation.");
  showNotices(now);
  showDashboard(facts, now.state);
}

function showTiles(now, facts, last) {
  const pace = now.pace, going = now.state === "running";
  const epoch = facts.steps_per_epoch ? Math.min(facts.epochs, Math.floor((last.step ?? 0) / facts.steps_per_epoch)) : last.epoch;
  const tiles = [
    ["step", last.step ?? "–", facts.steps ? `of ${facts.steps}` : ""],
    ["epochs done", epoch ?? "–", facts.epochs ? `of ${facts.epochs}` : ""],
    ["training loss", short(last.loss, 4), ""],
    [`best ${facts.score ?? "accuracy"}, full`, scoreText(facts, now.best.score), now.best.epoch !== undefined ? `epoch ${now.best.epoch}` : ""],
    ["samples/s", pace.samples ? Math.round(pace.samples).toLocaleString("en") : "–", pace.step ? `${short(1000 * pace.step)} ms a step` : ""],
    ["time left", going && pace.left !== undefined ? clock(pace.left) : "–", ""],
    ["recoveries", now.recoveries, facts.actors ? `${facts.actors} actors` : "one process"],
  ];
  if (last.leak !== undefined && last.leak !== null) tiles.push(["label leak", short(last.leak, 2), "nats"]);
  fill("tiles", ...tiles.map(([name, value, more]) => {
    const tile = make("div", {class: "tile"});
    tile.append(make("span", {}, name), make("b", {}, value), " ", make("small", {}, more));
    return tile;
  }));
}

function showPlaces(facts, last) {
  $("tree-step").textContent = last.step ? `at step ${last.step}` : "";
  const places = last.places ?? {};
  if (facts.nodes?.length) fill("tree", ...drawTree(facts.nodes, facts.N, places));
  else {
    const entries = Object.entries(places).filter(([, t]) => t.loss !== undefined).map(([p, t]) => [`${facts.places ?? "node"} ${p}`, t.loss]);
    if (entries.length) fill("tree", drawBars(entries)); else nothing("tree", "No loss has been logged yet.");
  }
}

function showScores(facts) {
  const last = kept.scores.at(-1);
  if (!last) {
    nothing("paths", "No path has been scored yet; that happens at the end of an epoch.");
    return nothing("scores", "No path has been scored yet.");
  }
  const names = Object.keys(last[1]), what = facts.score ?? "accuracy";
  $("paths-epoch").textContent = `epoch ${last[0]}`;
  $("scores-title").textContent = `${what[0].toUpperCase()}${what.slice(1)} over the epochs, on validation`;
  const table = make("table"), head = make("tr"), body = make("tbody"), thead = make("thead");
  for (const cell of ["path", "blocks", what]) head.append(make("th", {}, cell));
  head.append(make("th", {class: "route"}, "route"));
  thead.append(head);
  names.forEach((name, k) => {
    const line = make("tr"), first = make("td"), dot = legend([[COLORS[k % COLORS.length], name]]);
    dot.style.margin = 0;
    first.append(dot);
    const path = facts.paths?.[name] ?? [], shown = path.length > 24 ? [...path.slice(0, 4), "…", path.at(-1)] : path;
    const route = make("td", {class: "route"}, shown.join("-"));
    line.append(first, make("td", {}, facts.blocks?.[name] ?? ""), make("td", {}, scoreText(facts, last[1][name])), route);
    body.append(line);
  });
  table.append(thead, body);
  fill("paths", table);
  const series = names.map((name, k) => ({color: COLORS[k % COLORS.length], points: kept.scores.map(([e, s]) => [e, s[name]]), width: name === "full" ? 2.6 : 1.6}));
  fill("scores", chart(series, {show: v => what === "accuracy" ? `${short(100 * v)} %` : short(v), label: "epoch"}),
       legend(names.map((name, k) => [COLORS[k % COLORS.length], name])));
}

function showProbe(probe) {
  if (!probe.curve) return nothing("probe", "Not measured: train with probe.every=… or run treeprop probe.");
  const curve = chart([{color: COLORS[2], points: probe.curve}], {low: 0, high: 1, dots: probe.curve.length < 60});
  const whole = Object.entries(probe.whole).filter(([k]) => ["cosine", "norm_bp", "norm_tree", "F", "nll", "gap"].includes(k));
  const figures = legend(whole.map(([k, v]) => ["transparent", `${k} ${short(v)}`]));
  const title = make("p", {class: "empty"}, `The same for each block of the chain, at step ${probe.step}:`);
  fill("probe", curve, figures, title, drawBars(Object.entries(probe.blocks), {high: 1, show: v => v.toFixed(2)}));
}

function showNotices(now) {
  const words = {start: e => `taken up at step ${e.step}`, end: e => `finished after ${e.step} steps`,
                 stop: e => `stopped at step ${e.step}`, notice: e => e.text};
  const list = make("ol", {class: "notices"});
  for (const e of [...now.notices].reverse()) {
    const item = make("li", String(e.text ?? "").startsWith("lost ") ? {class: "lost"} : {});
    item.append(make("time", {}, new Date(1000 * e.time).toLocaleTimeString("en-GB")), (words[e.kind] ?? (() => e.kind))(e));
    list.append(item);
  }
  if (list.children.length) fill("notices", list); else nothing("notices", "Nothing but steps: no actor was lost, nobody has stopped it.");
}

function showDashboard(facts, state) {
  const at = String(facts.dashboard ?? "");
  if (/^https?:\/\//.test(at)) {
    const link = make("a", {href: at + "/#/actors", target: "_blank", rel: "noreferrer noopener"}, at);
    fill("dashboard", "Ray’s dashboard: ", link, state === "running" ? " (asks for what ray get-auth-token prints)" : " (while the run goes)");
  } else fill("dashboard", "Ray’s dashboard: ", make("code", {}, "train … engine=ray ray.dashboard=true"), " starts one.");
}

async function ask() {
  const words = new URLSearchParams(location.search);
  for (const [key, value] of [["place", kept.place], ["known", kept.known], ["waves", kept.mark]]) words.set(key, value);
  let wait = 1000;
  try {
    const answer = await fetch(`data?${words}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    const now = await answer.json();
    take(now);
    if (now.state !== "running" && now.state !== "waiting") wait = 4000;
  } catch (problem) {
    console.warn(String(problem));
    $("state").textContent = "no answer from treeprop watch; asking again";
    $("state").className = "state away";
    wait = 2000;
  }
  setTimeout(ask, wait);
}
ask();

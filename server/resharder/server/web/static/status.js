// The daemon's status, asked for again and again and drawn anew where it has changed. Whatever it says is text, never HTML.
"use strict";

const EVERY = 1000, PATIENCE = 5000, HIDDEN = 10000; // milliseconds
const drawn = new Map(); // of each part, what it shows
let reached = null; // when the daemon was heard of last, by this host's clock
let known = null; // the daemon's own time then
const daemonNow = () => (known === null ? 0 : known + Date.now() / 1000 - reached);

// Elements

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== "" && child !== null));
  return made;
}

const div = (kind, ...children) => element("div", kind ? { class: kind } : {}, ...children);
const span = (kind, ...children) => element("span", kind ? { class: kind } : {}, ...children);
const soft = (text) => span("soft", text);

// Words

// What is shown of a state comes with it: the same word and severity as in the command.
const chip = (badge) => span(`chip ${badge.severity}`, badge.text);

function bytes(count) {
  return count >= 2 ** 28 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(1)} MiB`; // as the command does
}

function duration(seconds) {
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

const stamp = (time) => `${new Date(time * 1000).toISOString().slice(0, 19).replace("T", " ")}Z`;
const ago = (seconds) => (seconds < 1 ? "now" : seconds < 120 ? `${Math.floor(seconds)} s ago` : `${duration(seconds)} ago`);

// A time as long ago as it is by the daemon's clock, with the time itself on hover; `keepTime` goes on with it.
function when(time) {
  return element("time", { datetime: new Date(time * 1000).toISOString(), title: stamp(time), "data-time": String(time) },
    ago(daemonNow() - time));
}

function keepTime() {
  for (const one of document.querySelectorAll("time[data-time]")) {
    const text = ago(daemonNow() - Number(one.dataset.time));
    if (one.textContent !== text) one.textContent = text;
  }
}

const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const version = (number) => (number ? `version ${number}` : "no version");

function bar(value, max, label, kind = "") {
  const attributes = { value: String(value), max: String(Math.max(max, 1)), "aria-label": label };
  return element("progress", kind ? { ...attributes, class: kind } : attributes);
}

// Parts of the page

function drawHealth(fleets) {
  if (!fleets.length) return [div("card soft", "No fleets yet. A fleet appears when its first vLLM server connects.")];
  const names = ["fleet", "health", "serving", "wants", "behind", "failed", "lost", "why"];
  const head = element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
  return [div("card", element("table", { class: "health" }, head, element("tbody", {}, ...fleets.map(drawFleetHealth))))];
}

function drawFleetHealth(fleet) {
  const { health, lag } = fleet;
  const cell = (name, ...children) => element("td", { "data-name": name }, ...children);
  const number = (count, kind) => span(count ? `${kind}-number` : "soft", String(count));
  const far = lag.versions ? soft(` (${count(lag.versions, "version")}, ${duration(lag.seconds)})`) : "";
  return element("tr", { "data-health": fleet.name },
    element("th", { scope: "row" }, element("a", { href: `#fleet-${fleet.name}` }, fleet.name)), element("td", {}, chip(health.badge)),
    cell("serving", `${health.serving} of ${health.servers}`), cell("wants", fleet.wanted ? String(fleet.wanted) : "none"),
    cell("behind", number(health.behind, "warn"), far), cell("failed", number(health.failed, "bad")),
    cell("lost", number(health.lost, "bad")), element("td", {}, fleet.reason));
}

function drawProblems(problems) {
  return problems.map((problem) => element("p", { class: "alarm" }, problem));
}

function drawStore({ used, limit, badge }) {
  const text = `store: ${bytes(used)} of ${bytes(limit)}`;
  return [div("card", div("head", text, badge ? chip(badge) : ""), bar(used, limit, text, badge ? badge.severity : ""))];
}

function drawMoves(fleets, moving) {
  const moves = fleets.filter((fleet) => fleet.move && fleet.move.active).map(drawMove);
  const others = moving.map((one) => (one.kind === "publish" ? drawPublish(one) : drawInstalling(one)));
  if (!moves.length && !others.length) return [div("card soft", "Nothing moves: no fleet, no version that arrives, no install.")];
  return [...moves, ...others];
}

function drawMove({ name, move, servers }) {
  const there = `${move.there} of ${count(servers.length, "server")} there`;
  const way = `${move.from ? `version ${move.from}` : "no version"} → ${move.to}`;
  return div(`card ${move.badge.severity}`, div("head", element("h3", {}, `fleet ${name}`), chip(move.badge), span("", `${way}, ${there}`),
    move.started ? span("soft", "started ", when(move.started)) : ""), bar(move.there, servers.length, there, move.badge.severity));
}

function drawPublish(one) {
  const there = `${bytes(one.received)} of ${bytes(one.size)}, ${one.sealed} of ${count(one.slots, "slot")} sealed`;
  return div("card", div("head", element("h3", {}, one.name), chip(one.badge), soft(`step ${one.step}`),
    span("", `${there}, ${bytes(one.bytes_per_second)}/s, started `, when(one.since))),
  bar(one.received || one.sealed, one.received ? one.size : one.slots, there));
}

function drawInstalling(one) {
  const there = `${one.done} of ${count(one.workers, "worker")} done`;
  return div("card", div("head", element("h3", {}, `servers/${one.server}`), chip(one.badge), soft(`fleet ${one.fleet}`),
    span("", `${version(one.version)}, ${there}, started `, when(one.since))), bar(one.done, one.workers, there));
}

function drawFleet(fleet) {
  const head = div("head", element("h3", {}, fleet.name), chip(fleet.health.badge),
    soft(`model ${fleet.model}${fleet.base && `, an adapter of ${fleet.base}`}, target ${fleet.target}, update strategy ${fleet.strategy}`));
  const card = div("card", head);
  card.append(fleet.servers.length ? drawServers(fleet.servers) : soft("no servers"));
  card.setAttribute("data-fleet", fleet.name);
  card.id = `fleet-${fleet.name}`;
  return card;
}

function drawServers(servers) {
  const names = ["server", "state", "version", "why", "last install", "requests", "last verification"];
  const head = element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
  return element("table", { class: "servers" }, head, element("tbody", {}, ...servers.map(drawServer)));
}

function drawServer(server) {
  const cell = (name, ...children) => element("td", { "data-name": name }, ...children);
  const to = server.wanted !== server.version ? ` → ${server.wanted}` : "";
  return element("tr", { "data-server": server.id }, element("th", { scope: "row" }, server.id),
    element("td", {}, chip(server.badge)), cell("version", `${server.version || "none"}${to}`),
    element("td", {}, server.reason), cell("last install", drawInstall(server.install)),
    cell("requests", String(server.in_flight)), cell("last verification", drawVerification(server.verification)));
}

function drawVerification(verification) {
  if (!verification) return "";
  const { compared, needed, why, time } = verification;
  return span("", `${bytes(compared)} of ${bytes(needed)} compared `, when(time), why && `; the rest not: ${why}`);
}

function drawInstall(install) {
  if (!install) return "";
  if (install.state === "FAILED") return span("bad-number", `${version(install.version)}: failed`);
  if (install.state !== "COMMITTED") return `${version(install.version)}: ${install.state.toLowerCase()}`;
  const said = [];
  const rate = `${bytes(install.stage_bytes_per_second)}/s`;
  if (install.stage_seconds) said.push(`staged in ${duration(install.stage_seconds)} (${rate})`);
  if (install.apply_seconds && !install.pause_seconds) said.push(`applied in ${duration(install.apply_seconds)}`);
  if (install.pause_seconds) {
    const phases = Object.entries(install.pause_phases).filter(([, seconds]) => seconds >= 0.0005);
    const parts = phases.map(([phase, seconds]) => `${phase} ${duration(seconds)}`).join(", ");
    said.push(`paused for ${duration(install.pause_seconds)}${parts && ` (${parts})`}`);
  }
  return said.join(", ") || "done";
}

function drawNode(node) {
  const there = `${bytes(node.used)} of ${bytes(node.limit)}`;
  const from = `${bytes(node.received.daemon)} from the daemon, ${bytes(node.received.peer)} from nodes`;
  const versions = node.versions.map((one) => {
    const share = one.uploading ? "UPLOADING" : one.held < one.needed ? `${Math.floor((100 * one.held) / one.needed)} %` : "held";
    const part = one.needed && one.needed < one.pieces ? ` of ${one.needed} of ${one.pieces} pieces` : "";
    return element("p", {}, `${one.name}: ${one.problem || share + part}`);
  });
  const head = div("head", element("h3", {}, node.id), chip(node.badge), soft(node.address), span("", there));
  const card = div("card", head, bar(node.used, node.limit, there), soft(`received ${from}; sent ${bytes(node.sent)}`), ...versions);
  card.setAttribute("data-node", node.id);
  return card;
}

function drawModel(model, now) {
  const { publisher } = model;
  const head = div("head", element("h3", {}, model.name), model.base ? soft(`adapter of ${model.base}`) : "");
  if (publisher) {
    const alive = `${publisher.live} of ${count(publisher.ranks, "rank")} alive`;
    head.append(chip(publisher.badge), soft(`job ${publisher.job}, epoch ${publisher.epoch}, ${alive}`));
    if (publisher.reason) head.append(element("p", {}, publisher.reason));
  }
  const card = div("card", head, ...drawLine(model.versions, now));
  if (model.older) card.append(soft(`and ${model.older} before`));
  return card;
}

// Versions on a time line: from when each was created to when it was READY, and from then on until it was retired.
function drawLine(versions, now) {
  if (!versions.length) return [soft("no version yet")];
  const first = Math.min(...versions.map((one) => one.created));
  const place = (mark, from, to) => {
    const all = Math.max(now - first, 1e-3);
    mark.style.left = `${Math.min(99, (100 * (from - first)) / all)}%`;
    mark.style.width = `${Math.max(0, (100 * (to - from)) / all)}%`;
    return mark;
  };
  const rows = versions.map((one) => {
    const ends = one.ready || (one.state === "UPLOADING" ? now : one.created);
    const track = div("track", place(span(one.state === "ABORTED" ? "failed" : "came"), one.created, ends));
    if (one.state === "READY") track.append(place(span("kept"), one.ready, now));
    if (one.state === "RETIRED") track.append(place(span("left"), one.ready, one.ended || one.ready));
    track.title = [one.reason, ...one.warnings].filter(Boolean).join("; ");
    const until = one.ended ? [" until ", when(one.ended)] : [];
    const base = one.base_version ? `, trained on base ${one.base_version}` : "";
    const life = one.ready ? element("small", { class: "soft" }, "published ", when(one.ready), ...until, base) : "";
    const notes = (one.skipped ? ", skipped by latest" : "") + (one.warnings.length ? ", with warnings" : "");
    const served = one.serving ? `, served by ${one.serving}${one.state === "UPLOADING" ? " ahead of READY" : ""}` : "";
    return div("line", span("name", `${one.number}`, soft(` · step ${one.step}`)), track,
      span("", chip(one.badge), soft(` ${bytes(one.size)}${served}${notes}`), life));
  });
  const ends = div("ends", when(first), span("", "now"));
  const legend = div("line axis", span("", "version"), ends, span("", "state, size"));
  return [legend, ...rows];
}

function drawEvents(events) {
  const row = (event) => element("li", { class: event.badge.severity }, span("soft", when(event.time)), span("", event.subject),
    span("", element("b", {}, event.what), event.details && ` (${event.details})`, event.reason && `: ${event.reason}`));
  return [element("ol", { class: "card events" }, ...events.map(row))];
}

// Keeping up

function draw(id, data, make) {
  const text = JSON.stringify(data);
  if (drawn.get(id) === text) return;
  drawn.set(id, text);
  document.getElementById(id).replaceChildren(...make());
}

function show(status) {
  const { release, started, unready } = status.daemon;
  draw("daemon", status.daemon, () => [`resharderd ${release}, started `, when(started), unready && `; ${unready}`]);
  const healths = status.fleets.map(({ name, health, lag, wanted, reason }) => [name, health, lag, wanted, reason]);
  draw("fleets", healths, () => drawHealth(status.fleets));
  draw("problems", status.problems, () => drawProblems(status.problems));
  draw("store", status.store, () => drawStore(status.store));
  draw("moving", [status.moving, status.fleets.map(({ name, move, servers }) => [name, move, servers.length])],
    () => drawMoves(status.fleets, status.moving));
  draw("servers", status.fleets, () => status.fleets.map(drawFleet));
  document.getElementById("nodes-section").hidden = !status.nodes.length;
  draw("nodes", status.nodes, () => status.nodes.map(drawNode));
  const lines = () => status.models.map((model) => drawModel(model, status.time));
  draw("models", [status.models, Math.round(status.time / 5)], lines); // the time line goes on while nothing happens
  draw("events", status.events, () => drawEvents(status.events));
  document.getElementById("all").hidden = false;
}

function tell(problem) {
  const link = document.getElementById("link"), away = document.getElementById("away"), all = document.getElementById("all");
  away.hidden = !problem;
  all.className = problem ? "gone-main" : "";
  const text = problem ? "not connected" : "live";
  if (link.textContent !== text) link.textContent = text;
  if (!problem) return draw("away", "", () => []);
  const since = () => [`${problem}. It last answered at ${stamp(known).slice(11)} (`, when(known), "); below is what was known then."];
  draw("away", [problem, known], () => (known === null ? [problem] : since()));
}

async function ask() {
  try {
    const answer = await fetch("/api/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    return answer.ok ? [await answer.json(), ""] : [null, `The daemon answers ${answer.status}`];
  } catch {
    return [null, "The daemon is not reachable"];
  }
}

async function follow() {
  const [status, problem] = await ask();
  setTimeout(follow, document.hidden ? HIDDEN : EVERY);
  if (status) {
    reached = Date.now() / 1000;
    known = status.time;
    show(status);
  }
  tell(problem);
}

setInterval(keepTime, 1000);

follow();

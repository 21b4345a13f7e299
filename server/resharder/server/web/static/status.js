// The daemon's status, asked for again and again and drawn anew where it has changed. Whatever it says is text, never HTML.
"use strict";

const EVERY = 1000, PATIENCE = 5000, HIDDEN = 10000; // milliseconds
const drawn = new Map(); // of each part, what it shows
let reached = null;

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

const KINDS = {
  SERVING: "good", READY: "good", DONE: "good", ACTIVE: "good",
  STAGING: "busy", UPLOADING: "busy", APPLYING: "busy", BOOTING: "busy", MOVING: "busy", TRYING: "busy", HOLDING: "busy", REGISTERING: "busy",
  GONE: "warn", WAITING: "warn", DRAINED: "warn", ASLEEP: "warn", BACK: "warn", STOPPED: "bad",
  FAILED: "bad", LOST: "bad", ABORTED: "bad", REJECTED: "bad",
};
const chip = (text, kind) => span(`chip ${kind || KINDS[text] || ""}`, text);

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
const clock = (time) => stamp(time).slice(11);
const count = (number, what) => `${number} ${what}${number === 1 ? "" : "s"}`;
const version = (number) => (number ? `version ${number}` : "no version");

function bar(value, max, label) {
  return element("progress", { value: String(value), max: String(Math.max(max, 1)), "aria-label": label });
}

// Parts of the page

function drawProblems(problems) {
  return problems.map((problem) => element("p", { class: "alarm" }, problem));
}

function drawStore({ used, limit }) {
  const text = `store: ${bytes(used)} of ${bytes(limit)}`;
  return [div("card", div("head", text), bar(used, limit, text))];
}

function drawMoving(moving) {
  if (!moving.length) return [div("card soft", "Nothing: no version is arriving, no server installs.")];
  return moving.map((one) => (one.kind === "publish" ? drawPublish(one) : drawInstalling(one)));
}

function drawPublish(one) {
  const there = `${bytes(one.received)} of ${bytes(one.size)}, ${one.sealed} of ${count(one.slots, "slot")} sealed`;
  return div("card", div("head", element("h3", {}, one.name), chip("arriving", "busy"), soft(`step ${one.step}`),
    span("", `${there}, ${bytes(one.bytes_per_second)}/s since ${clock(one.since)}`)),
  bar(one.received || one.sealed, one.received ? one.size : one.slots, there));
}

function drawInstalling(one) {
  const there = `${one.done} of ${count(one.workers, "worker")} done`;
  return div("card", div("head", element("h3", {}, one.server), chip(one.state), soft(`fleet ${one.fleet}`),
    span("", `${version(one.version)}, ${there}, since ${clock(one.since)}`)), bar(one.done, one.workers, there));
}

function drawFleet(fleet) {
  const { lag, move } = fleet;
  const away = `${count(lag.versions, "version")}, ${duration(lag.seconds)} behind`;
  const behind = lag.versions ? chip(away, "warn") : chip("up to date", "good");
  const head = div("head", element("h3", {}, fleet.name), move && move.active ? chip(move.state) : "",
    fleet.servers.length ? behind : chip("no servers"),
    soft(`model ${fleet.model}, target ${fleet.target}, update strategy ${fleet.strategy}`));
  const card = div("card", head, element("p", {}, fleet.reason));
  const there = move && `${move.there} of ${fleet.servers.length} servers there`;
  if (move && move.active) card.append(bar(move.there, fleet.servers.length, there));
  if (fleet.servers.length) card.append(drawServers(fleet.servers));
  card.setAttribute("data-fleet", fleet.name);
  return card;
}

function drawServers(servers) {
  const names = ["server", "state", "version", "why", "last install", "requests", "last verification"];
  const head = element("thead", {}, element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
  return element("table", {}, head, element("tbody", {}, ...servers.map(drawServer)));
}

function drawServer(server) {
  const cell = (name, ...children) => element("td", { "data-name": name }, ...children);
  const to = server.wanted !== server.version ? ` → ${server.wanted}` : "";
  return element("tr", { "data-server": server.id }, element("th", { scope: "row" }, server.id),
    element("td", {}, chip(server.state)), cell("version", `${server.version || "none"}${to}`),
    element("td", {}, server.reason), cell("last install", drawInstall(server.install)),
    cell("requests", String(server.in_flight)), cell("last verification", drawVerification(server.verification)));
}

function drawVerification(verification) {
  if (!verification) return "";
  const { compared, needed, why, time } = verification;
  return `${bytes(compared)} of ${bytes(needed)} compared at ${clock(time)}${why && `; the rest not: ${why}`}`;
}

function drawInstall(install) {
  if (!install) return "";
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
  const head = div("head", element("h3", {}, node.id), chip(node.state), soft(node.address), span("", there));
  const card = div("card", head, bar(node.used, node.limit, there), soft(`received ${from}; sent ${bytes(node.sent)}`), ...versions);
  card.setAttribute("data-node", node.id);
  return card;
}

function drawModel(model, now) {
  const { publisher } = model;
  const head = div("head", element("h3", {}, model.name));
  if (publisher) {
    const heard = `${publisher.live} of ${count(publisher.ranks, "rank")} heard of`;
    head.append(chip(publisher.state), soft(`job ${publisher.job}, epoch ${publisher.epoch}, ${heard}`));
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
    const until = one.ended ? clock(one.ended) : one.state === "READY" ? "now" : "";
    const life = one.ready ? `published ${clock(one.ready)}${until && ` .. ${until}`}` : "";
    const notes = (one.skipped ? ", skipped by latest" : "") + (one.warnings.length ? ", with warnings" : "");
    const served = one.serving ? `, served by ${one.serving}${one.state === "UPLOADING" ? " ahead of READY" : ""}` : "";
    return div("line", span("name", `${one.number}`, soft(` · step ${one.step}`)), track,
      span("", chip(one.state), soft(` ${bytes(one.size)}${served}${notes}`), life && element("small", { class: "soft" }, life)));
  });
  const ends = div("ends", span("", clock(first)), span("", "now"));
  const legend = div("line axis", span("", "version"), ends, span("", "state, size"));
  return [legend, ...rows];
}

function drawEvents(events) {
  const row = (event) => element("li", {}, soft(clock(event.time)), span("", event.subject),
    span("", element("b", {}, event.what), event.reason ? `: ${event.reason}` : ""));
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
  document.getElementById("daemon").textContent =
    `resharderd ${status.daemon.release}, up since ${stamp(status.daemon.started)}` +
    (status.daemon.unready ? `; ${status.daemon.unready}` : "");
  draw("problems", status.problems, () => drawProblems(status.problems));
  draw("store", status.store, () => drawStore(status.store));
  draw("moving", status.moving, () => drawMoving(status.moving));
  draw("fleets", status.fleets, () => status.fleets.map(drawFleet));
  document.getElementById("nodes-section").hidden = !status.nodes.length;
  draw("nodes", status.nodes, () => status.nodes.map(drawNode));
  const lines = () => status.models.map((model) => drawModel(model, status.time));
  draw("models", [status.models, Math.round(status.time / 5)], lines); // the time line goes on while nothing happens
  draw("events", status.events, () => drawEvents(status.events));
  document.getElementById("all").hidden = false;
}

function tell(problem) {
  const link = document.getElementById("link"), all = document.getElementById("all");
  link.className = problem ? "gone" : "";
  all.className = problem ? "gone-main" : "";
  const text = !problem ? "live" : reached ? `${problem} since ${clock(reached)}; below is what was known then` : problem;
  if (link.textContent !== text) link.textContent = text;
}

async function ask() {
  try {
    const answer = await fetch("/api/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    return answer.ok ? [await answer.json(), ""] : [null, `the daemon answers ${answer.status}`];
  } catch {
    return [null, "the daemon is not reachable"];
  }
}

async function follow() {
  const [status, problem] = await ask();
  setTimeout(follow, document.hidden ? HIDDEN : EVERY);
  if (status) {
    reached = Date.now() / 1000;
    show(status);
  }
  tell(problem);
}

follow();

// The page: asks the server what it does, twice a second while somebody looks, and draws it. Everything that comes from
// the server is shown as text (textContent, canvas text), never as markup: request ids are what clients say they are.
// history.js and chat.js are the views of these names. Not here: libraries, a build step, anything that changes the server.
//
// Times are microseconds since the server's start, as the server sends them.
"use strict";

const $ = (id) => document.getElementById(id);
const SECOND = 1e6;
const STILL = matchMedia("(prefers-reduced-motion: reduce)");
const DARK = matchMedia("(prefers-color-scheme: dark)");
/** Narrow as in page.css: tables become cards there, and ended requests lines. */
const PHONE = matchMedia("(max-width: 720px)");

// ---- Words -------------------------------------------------------------------------------------------------------

const number = (value) => Math.round(value).toLocaleString("en");
const plural = (count, thing) => `${number(count)} ${thing}${count === 1 ? "" : "s"}`;

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit === 0 ? value : value.toFixed(value < 100 ? 1 : 0)} ${units[unit]}`;
}

function length(us) {
  if (us === null || us === undefined) return "–";
  const digits = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0));
  if (us < 0.9995) return us <= 0 ? "0 µs" : `${Math.max(1, Math.round(us * 1e3))} ns`;
  if (us < 999.5) return `${digits(us)} µs`;
  if (us < 999.5e3) return `${digits(us / 1e3)} ms`;
  if (us < 60e6) return `${digits(us / 1e6)} s`;
  const seconds = Math.floor(us / 1e6);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds / 60) % 60} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds / 3600) % 24} h`;
}

const big = (value) => (value >= 1e9 ? `${(value / 1e9).toFixed(1)} B` : value >= 1e6 ? `${(value / 1e6).toFixed(1)} M` : number(value));
const words = (name) => name.replaceAll("_", " ");
const rateText = (rate) => (rate > 0 && rate < 10 ? rate.toFixed(1) : number(rate));

/** The value below which `share` of the sorted values lie (nearest rank). */
const percentile = (sorted, share) => sorted[Math.max(0, Math.ceil(sorted.length * share) - 1)];

// ---- Elements ----------------------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Only where it differs: a selection, or a reader, is not disturbed by what stays the same. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** Keeps one child of `parent` for each item, in order: made once, updated after. */
function keyed(parent, items, key, make, update) {
  const old = new Map([...parent.children].map((child) => [child.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    let child = old.get(name);
    old.delete(name);
    if (!child) {
      child = make(item);
      child.key = name;
    }
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const child of old.values()) child.remove();
}

/** A bar of parts: `[[class, share 0 to 1, title]]`. */
function fill(bar, parts) {
  keyed(bar, parts, ([name]) => name, () => document.createElement("i"), (part, [name, share, title]) => {
    part.className = name;
    part.style.width = `${(Math.min(Math.max(share, 0), 1) * 100).toFixed(2)}%`;
    part.hidden = share <= 0;
    if (title) part.title = title;
  });
}

// ---- What is known -----------------------------------------------------------------------------------------------

const KEPT_STEPS = 2048;
const KEPT_TRANSFERS = 4096;
const KEPT_ENDED = 512;
const HISTORY = 120;

const known = {
  state: null,
  /** By replica: `{ next, steps }`. */
  steps: new Map(),
  /** By device index: `{ next, transfers }`. */
  transfers: new Map(),
  running: [],
  ended: [],
  endedSince: 0,
  /** The server answers, but not all that was asked. */
  incomplete: false,
  /** The server's time and ours when it was told. */
  clock: { server: 0, ours: 0 },
  /** Tokens drawn, by second. */
  seconds: new Map(),
};

function forget() {
  known.steps.clear();
  known.transfers.clear();
  known.seconds.clear();
  known.running = [];
  known.ended = [];
  known.endedSince = 0;
  chart.forget();
  forgetHistory();
}

/** The server's time now. */
const serverNow = () => known.clock.server + (performance.now() - known.clock.ours) * 1e3;
const replicas = () => (known.state?.models ?? []).flatMap((model) => model.replicas);

/** The server did not answer, or not as it should. */
class Gone extends Error {}

async function get(path) {
  try {
    const response = await fetch(path, { signal: AbortSignal.timeout(5000), cache: "no-store" });
    if (response.ok) return await response.json();
    throw new Gone(`${path}: ${response.status}`);
  } catch (error) {
    throw error instanceof Gone ? error : new Gone(`${path}: ${error.message}`);
  }
}

async function ask() {
  const state = await get("/api/state");
  if (state.now < known.clock.server) forget();
  known.clock = { server: state.now, ours: performance.now() };
  known.state = state;
  if (state.status === "loading") return;
  const jobs = replicas().map((replica) => askSteps(replica.name));
  jobs.push(askRequests());
  if (view() === "history") jobs.push(askHistory());
  if (view() === "timeline" && chart.device !== null) jobs.push(askTransfers(chart.device));
  const failed = (await Promise.allSettled(jobs)).filter((job) => job.status === "rejected").map((job) => job.reason);
  for (const error of failed) if (!(error instanceof Gone)) throw error;
  known.incomplete = failed.length > 0;
}

async function askSteps(replica) {
  const kept = known.steps.get(replica) ?? { next: null, steps: [] };
  const range = kept.next === null ? "last=512" : `from=${kept.next}`;
  const found = await get(`/api/steps?replica=${encodeURIComponent(replica)}&${range}`);
  for (const step of found.steps) {
    kept.steps.push(step);
    const second = Math.floor(step.taken / SECOND);
    known.seconds.set(second, (known.seconds.get(second) ?? 0) + step.tokens);
  }
  kept.next = found.next ?? kept.next;
  kept.steps.splice(0, Math.max(0, kept.steps.length - KEPT_STEPS));
  known.steps.set(replica, kept);
  const oldest = Math.floor(found.now / SECOND) - HISTORY - 2;
  for (const second of known.seconds.keys()) if (second < oldest) known.seconds.delete(second);
}

async function askTransfers(device) {
  const kept = known.transfers.get(device) ?? { next: 0, transfers: [] };
  const found = await get(`/api/transfers?device=${device}&from=${kept.next}`);
  kept.next = found.next;
  kept.transfers.push(...found.transfers);
  kept.transfers.splice(0, Math.max(0, kept.transfers.length - KEPT_TRANSFERS));
  known.transfers.set(device, kept);
}

async function askRequests() {
  const found = await get(`/api/requests?since=${known.endedSince}`);
  // A moment goes through microseconds with three digits: what ended at that very moment may come twice.
  const seen = new Set(known.ended.slice(-64).map((ended) => `${ended.at} ${ended.id}`));
  known.ended.push(...found.ended.filter((ended) => !seen.has(`${ended.at} ${ended.id}`)));
  known.ended.splice(0, Math.max(0, known.ended.length - KEPT_ENDED));
  known.endedSince = known.ended.at(-1)?.at ?? 0;
  // The server reads its lists one after the other: a request that ends in between is in both.
  const ends = new Map(known.ended.map((ended) => [ended.id, ended.at]));
  known.running = found.running.filter((running) => !(ends.get(running.id) > found.now - running.age));
}

// ---- Views -------------------------------------------------------------------------------------------------------

const VIEWS = ["overview", "chat", "history", "timeline", "requests"];
const view = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "overview");

function route() {
  const loading = !known.state || known.state.status === "loading";
  show($("loading"), known.state !== null && loading);
  show(document.querySelector("nav"), !loading);
  for (const name of VIEWS) show($(name), !loading && name === view());
  for (const link of document.querySelectorAll("nav a")) {
    const here = link.hash.slice(1) === view();
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const shown = loading ? "loading" : view();
  document.title = `${shown[0].toUpperCase()}${shown.slice(1)} · Ostinato`;
  document.body.dataset.view = shown;
}

function render() {
  const state = known.state;
  route();
  const status = $("status");
  const closed = replicas().filter((replica) => replica.closed);
  const word = state.status === "closed" && closed.every((replica) => replica.closed === "it is draining") ? "draining" : state.status;
  status.dataset.status = gone ? "gone" : state.status;
  say(status, gone ? "gone" : word === "closed" ? "not serving" : word);
  const models = state.status === "loading" ? "" : `${plural(state.models.length, "model")} on ${plural(state.devices.length, "device")} · `;
  say($("summary"), `${models}up ${state.now < 60e6 ? `${Math.floor(state.now / SECOND)} s` : length(state.now)}`);
  say($("version"), `Ostinato ${state.version}${state.endpoint ? ` · gRPC at ${state.endpoint}` : ""}`);
  say($("warnings"), state.warnings.join("\n"));
  show($("warnings"), state.warnings.length > 0);
  if (state.status === "loading") return renderLoading(state.loading);
  renderOverview(state);
  renderChat();
  renderHistory();
  renderRequests();
  chart.update();
}

function log(element, lines) {
  const end = element.scrollTop + element.clientHeight >= element.scrollHeight - 4;
  say(element, lines.join("\n"));
  show(element, lines.length > 0);
  if (end) element.scrollTop = element.scrollHeight;
}

function renderLoading({ step, lines }) {
  const bar = $("loading-progress");
  if (step && step.total > 0) {
    bar.max = step.total;
    bar.value = step.done;
  } else {
    bar.removeAttribute("value");
  }
  say($("loading-what"), step ? step.what[0].toUpperCase() + step.what.slice(1) : "Opening devices");
  let text = "";
  if (step) {
    const [done, total] = step.unit === "bytes" ? [bytes(step.done), bytes(step.total)] : [number(step.done), number(step.total)];
    const seconds = (known.state.now - step.begun) / SECOND;
    const rate = step.done / seconds;
    text = `${done} of ${total}`;
    if (step.unit === "bytes" && step.done > 0 && seconds > 0.2) text += ` · ${bytes(rate)}/s`;
    if (step.done > 0 && step.done < step.total && seconds > 0.5) text += ` · ${length(((step.total - step.done) / rate) * SECOND)} left`;
  }
  say($("loading-numbers"), text);
  log($("loading-lines"), lines);
}

// ---- Overview ----------------------------------------------------------------------------------------------------

/** Tokens per second of the last seconds, of one replica or of all. */
function tokenRate(replica) {
  const window = 3 * SECOND;
  const from = known.clock.server - window;
  const lists = replica ? [known.steps.get(replica)] : [...known.steps.values()];
  let tokens = 0;
  for (const list of lists) {
    const steps = list?.steps ?? [];
    for (let index = steps.length - 1; index >= 0 && steps[index].taken > from; index -= 1) tokens += steps[index].tokens;
  }
  return tokens / (window / SECOND);
}

function renderOverview(state) {
  const rate = tokenRate();
  say($("rate"), rateText(rate));
  document.body.dataset.rate = rate.toFixed(2);
  history();
  const last = known.ended.filter((ended) => ended.reason === "stop" || ended.reason === "length").slice(-200);
  latency("first-token", last.map((ended) => ended.first_token));
  latency("per-token", last.map((ended) => ended.per_token));
  latency("queue-time", last.map((ended) => ended.queue));
  const all = replicas();
  const sum = (field) => all.reduce((total, replica) => total + replica[field], 0);
  say($("now-running"), number(sum("running")));
  say($("now-waiting"), `running, ${number(sum("waiting"))} waiting, ${plural(sum("slots"), "slot")}`);
  document.body.dataset.running = sum("running");

  const idle = all.every((replica) => replica.unfinished === 0);
  show($("idle"), idle && state.status === "serving");
  const name = state.models.length > 1 ? ` --model ${quote(state.models[0].name)}` : "";
  say($("idle-command"), `ostinato generate --server http://${state.endpoint ?? "ADDRESS"}${name} --prompt "Once upon a time"`);

  keyed($("models"), state.models, (model) => model.name, makeModel, updateModel);
  const apart = state.configured.filter((model) => model.state !== "serving");
  show($("apart"), apart.length > 0);
  keyed($("apart"), apart, (model) => model.name, makeApart, updateApart);
  keyed($("devices"), state.devices, (device) => device.index, makeDevice, updateDevice);
  log($("start-lines"), state.loading.lines.length ? state.loading.lines : ["nothing was logged"]);
}

/** As a shell takes it for one word. */
const quote = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function latency(id, values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (sorted.length === 0) {
    say($(id), "–");
    say($(`${id}-sub`), "no ended request yet");
    return;
  }
  say($(id), length(percentile(sorted, 0.5)));
  say($(`${id}-sub`), `p50; p95 ${length(percentile(sorted, 0.95))}, of ${plural(sorted.length, "request")}`);
}

function history() {
  const canvas = $("rate-history");
  const draw = canvasOf(canvas);
  if (!draw) return;
  const { context, width, height } = draw;
  // The second that is not over yet would look like a drop.
  const end = Math.floor(known.clock.server / SECOND);
  const values = Array.from({ length: HISTORY }, (_, index) => known.seconds.get(end - HISTORY + index) ?? 0);
  const most = Math.max(...values, 1);
  context.clearRect(0, 0, width, height);
  const x = (index) => (index / (HISTORY - 1)) * width;
  const y = (value) => height - 2 - (value / most) * (height - 14);
  context.strokeStyle = colour("line");
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(0, height - 1.5);
  context.lineTo(width, height - 1.5);
  context.stroke();
  context.beginPath();
  values.forEach((value, index) => context.lineTo(x(index), y(value)));
  context.strokeStyle = colour("accent");
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(0, height);
  context.closePath();
  context.globalAlpha = 0.13;
  context.fillStyle = colour("accent");
  context.fill();
  context.globalAlpha = 1;
  const top = Math.max(...values);
  if (top > 0) {
    context.fillStyle = colour("muted");
    context.font = "11px system-ui, sans-serif";
    const text = `most ${number(top)}`;
    const at = x(values.indexOf(top));
    context.textAlign = at > width / 2 ? "right" : "left";
    context.fillText(text, at, 10);
  }
  canvas.setAttribute("aria-label", `Tokens per second over the last two minutes, at most ${number(top)}`);
}

function labelled(label) {
  const value = el("span", { class: "value" });
  return [el("div", null, el("span", { class: "label" }, label), value), value];
}

function makeModel(model) {
  const card = el("article", { class: "card" });
  card.about = el("p", { class: "sub" });
  card.contracts = el("p", { class: "sub", "data-contracts": model.name });
  card.replicas = el("div", { class: "replicas" });
  card.append(el("h3", null, model.name), card.about, card.contracts, card.replicas);
  return card;
}

function updateModel(card, model) {
  const active = model.active_parameters < model.parameters ? `, ${big(model.active_parameters)} of them for each token` : "";
  say(card.about, `${model.architecture} · ${big(model.parameters)} parameters${active} · ${bytes(model.weight_bytes)} of weights · context ${number(model.context)} tokens`);
  say(card.contracts, contracts(model.name));
  keyed(card.replicas, model.replicas, (replica) => replica.name, makeReplica, updateReplica);
}

/** Which contracts a model is served with, and where. The routers' one names no model. */
function contracts(name) {
  const { configured, endpoint, http, models } = known.state;
  const own = configured.find((model) => model.name === name)?.endpoint;
  const router = own ?? (models.length === 1 ? endpoint : null);
  return [
    `ostinato.v1 at ${[endpoint, own].filter(Boolean).join(" and ")}`,
    http ? `OpenAI’s API on port ${http.port}` : "OpenAI’s API is off",
    router ? `vllm.grpc.engine for routers at ${router}` : "vllm.grpc.engine for routers is off: of several models, it takes one with a listen address of its own",
  ].join(" · ");
}

/** A model of the configuration that is not loaded, or is on its way. */
function makeApart(model) {
  const card = el("article", { class: "card", "data-model": model.name });
  card.pill = el("span", { class: "pill" });
  card.bar = el("progress", { "aria-label": `How far ${model.name} is` });
  card.about = el("p", { class: "sub" });
  card.append(el("h3", null, model.name, " ", card.pill), card.bar, card.about);
  return card;
}

function updateApart(card, { name, state, step }) {
  card.pill.dataset.status = state;
  say(card.pill, state === "unloaded" ? "not loaded" : state);
  show(card.bar, step !== null);
  if (step) {
    card.bar.max = Math.max(step.total, 1);
    card.bar.value = step.done;
    const text = step.unit === "bytes" ? bytes : number;
    say(card.about, `${step.what}: ${text(step.done)} of ${text(step.total)}`);
  } else {
    const command = `ostinato models --server http://${known.state.endpoint ?? "ADDRESS"} load ${quote(name)}`;
    say(card.about, state === "unloaded" ? command : "");
  }
}

function makeReplica(replica) {
  const row = el("div", { class: "replica", "data-replica": replica.name });
  row.place = el("span", { class: "sub" });
  row.pill = el("span", { class: "pill" });
  const name = el("div", null, el("strong", null, replica.name), " ", row.pill, el("br"), row.place);
  let slots, pages, cache, rate;
  [slots, row.slots] = labelled("Slots");
  [pages, row.pages] = labelled("KV pages");
  [cache, row.cache] = labelled("Prefix cache");
  [rate, row.rate] = labelled("Tokens per second");
  row.slotBar = el("div", { class: "barline thin" });
  row.pageBar = el("div", { class: "barline thin" });
  row.cacheBar = el("div", { class: "barline thin" });
  slots.append(row.slotBar);
  pages.append(row.pageBar);
  cache.append(row.cacheBar);
  row.append(name, slots, pages, cache, rate);
  return row;
}

/** The indices of a replica's devices, in the order of its layers. */
function devicesOf(replica) {
  return replica.stages.length > 0 ? replica.stages.map((stage) => stage.device) : [replica.device];
}

function placeOf(replica) {
  const name = (index) => known.state.devices.find((device) => device.index === index)?.name ?? "?";
  if (replica.stages.length === 0) return `on ${name(replica.device)}`;
  const part = (stage) => `${name(stage.device)} (layers ${stage.first_layer} to ${stage.first_layer + stage.layers - 1})`;
  return `on ${replica.stages.map(part).join(" and ")}`;
}

function updateReplica(row, replica) {
  say(row.place, placeOf(replica));
  const why = replica.closed || (replica.rebuilding && "its device was lost and is being rebuilt");
  row.pill.dataset.status = why ? "closed" : "serving";
  say(row.pill, why || "serving");
  say(row.slots, `${replica.running} of ${replica.slots}${replica.waiting ? `, ${replica.waiting} waiting` : ""}`);
  fill(row.slotBar, [["fill", replica.running / replica.slots]]);
  const total = Math.max(replica.pages_total, 1);
  const lost = replica.preemptions ? `, ${plural(replica.preemptions, "preemption")}` : "";
  say(row.pages, `${number(replica.pages_used)} of ${number(replica.pages_total)}, ${number(replica.pages_cached)} cached${lost}`);
  fill(row.pageBar, [["fill", replica.pages_used / total, "in use"], ["cached", replica.pages_cached / total, "free, and may still be found by a prompt"]]);
  const share = replica.prompt_tokens ? replica.cached_tokens / replica.prompt_tokens : 0;
  say(row.cache, replica.prompt_tokens ? `${(share * 100).toFixed(0)} % of ${number(replica.prompt_tokens)} tokens` : "no prompt yet");
  fill(row.cacheBar, [["fill", share]]);
  const drafts = replica.drafted_tokens ? `; ${((replica.accepted_tokens / replica.drafted_tokens) * 100).toFixed(0)} % of drafts right` : "";
  say(row.rate, `${rateText(tokenRate(replica.name))}, ${number(replica.output_tokens)} so far${drafts}`);
  row.dataset.running = replica.running;
}

function makeDevice(device) {
  const card = el("article", { class: "card", "data-device": device.index });
  card.name = el("h3");
  card.free = el("span", { class: "muted" });
  card.about = el("p", { class: "sub" });
  card.bar = el("div", { class: "barline", role: "img" });
  card.legend = el("ul", { class: "legend" });
  card.rest = el("p", { class: "sub" });
  card.path = el("p", { class: "sub" });
  card.lacks = el("details", { class: "sub lacks" }, el("summary"), el("ul"));
  card.append(el("div", { class: "spread" }, card.name, card.free), card.about, card.bar, card.legend, card.rest, card.path, card.lacks);
  return card;
}

function updateDevice(card, device) {
  say(card.name, device.name);
  say(card.about, [`index ${device.index}`, device.pci && `PCI ${device.pci}`, device.uuid].filter(Boolean).join(" · "));
  const own = new Map();
  const host = new Map();
  for (const line of device.plan) {
    const side = line.side === "device" ? own : host;
    const before = side.get(line.purpose) ?? 0;
    // One staging ring serves all replicas of a device; each plan has a line for it.
    side.set(line.purpose, line.purpose === "staging" ? Math.max(before, line.bytes) : before + line.bytes);
  }
  const planned = [...own.values()].reduce((sum, size) => sum + size, 0);
  const heap = device.heap_bytes;
  show(card.bar, heap !== null);
  show(card.legend, heap !== null);
  if (heap === null) {
    say(card.free, "memory not known");
  } else {
    const used = device.used_bytes;
    const others = used === null ? 0 : Math.max(0, used - planned);
    const whole = Math.max(heap, planned + others);
    const parts = [...own].filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]).map(([name, size]) => [name, size]);
    if (others > 0) parts.push(["others", others]);
    const free = device.budget_bytes !== null ? Math.max(0, device.budget_bytes - Math.max(used, planned)) : Math.max(0, whole - planned);
    const label = { others: "driver and other" };
    fill(card.bar, parts.map(([name, size]) => [name.replaceAll(" ", "-"), size / whole, `${label[name] ?? name}: ${bytes(size)}`]));
    card.bar.setAttribute("aria-label", `Memory: ${parts.map(([name, size]) => `${label[name] ?? name} ${bytes(size)}`).join(", ")}, free ${bytes(free)}`);
    keyed(card.legend, [...parts, ["free", free]], ([name]) => name,
      ([name]) => el("li", null, el("i", { class: `swatch ${name.replaceAll(" ", "-")}` }), label[name] ?? name, " ", el("b")),
      (item, [, size]) => say(item.lastElementChild, bytes(size)));
    say(card.free, `${bytes(planned + others)} of ${bytes(heap)}`);
  }
  const rest = [];
  if (host.size) rest.push(`host memory: ${[...host].map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}`);
  if (device.transfer) rest.push(`transfer queue so far: ${plural(device.transfer.submits, "submission")}, ${bytes(device.transfer.bytes)}`);
  if (device.used_bytes === null && heap !== null) rest.push("its driver does not say how much is in use");
  say(card.rest, rest.join(" · "));
  show(card.rest, rest.length > 0);
  say(card.path, [device.path, device.driver].filter(Boolean).join(" · "));
  show(card.path, Boolean(device.path));
  say(card.lacks.firstElementChild, `what it lacks, and what that costs: ${plural(device.lacks.length, "thing")}`);
  keyed(card.lacks.lastElementChild, device.lacks, (lack) => lack.what, () => el("li"), (item, lack) => say(item, `${lack.what}: ${lack.cost}`));
  show(card.lacks, device.lacks.length > 0);
}

// ---- Requests ----------------------------------------------------------------------------------------------------

/** Ended requests that are shown at first. */
const FEW = 12;
let allEnded = false;
/** The keys of the ended requests whose lines are unfolded. */
const unfolded = new Set();
/** The id of the request that is shown whole. */
let opened = null;

/** Shows a request whole. Its card follows as soon as the server has told of it. */
function openRequest(id) {
  opened = opened === id ? null : id;
  if (known.state) renderRequests();
  if (opened !== null) $("request").scrollIntoView({ block: "nearest" });
}

/** The card of the opened request: all that is known of it. */
function renderRequest() {
  const ended = known.ended.findLast((request) => request.id === opened);
  const running = known.running.find((request) => request.id === opened);
  show($("request"), opened !== null);
  if (opened === null) return;
  say($("request-title"), opened);
  const request = running ?? ended;
  show($("request-timeline"), !!request);
  if (!request) {
    fillFacts($("request-facts"), [["State", "not known: it has not begun, or ended too long ago"]]);
    return;
  }
  fillFacts($("request-facts"), requestFacts(running, ended));
}

/** The facts of a request, which runs or, if `running` is missing, has ended. */
function requestFacts(running, ended) {
  const request = running ?? ended;
  const whole = request.whole ?? request.age;
  const queue = request.queue ?? request.queued;
  const facts = [["State", words(running ? running.phase : ended.error ?? ended.reason)], ["Replica", request.replica]];
  if (ended && !running) facts.push(["Operation", words(ended.operation)]);
  facts.push(
    ["Prompt tokens", number(request.input_tokens ?? request.prompt_tokens)], ["Of them cached", number(request.cached_tokens)],
    ["Output tokens", running ? `${number(running.output_tokens)} of ${number(running.max_tokens)}` : number(ended.output_tokens)],
    ["Queue", length(queue)], ["Prefill", request.first_token === null ? "–" : length(request.first_token - queue)],
    ["First token", length(request.first_token)], ["Decode", request.first_token === null ? "–" : length(whole - request.first_token)],
  );
  if (ended && !running) facts.push(["A token", length(ended.per_token)]);
  facts.push(["In all", length(whole)], running ? ["Began", `${length(running.age)} ago`] : ["Ended", `${length(known.clock.server - ended.at)} ago`]);
  if (running) facts.push(["Pages", number(running.pages)], ["Preemptions", number(running.preemptions)]);
  else facts.push(["Trace", ended.trace ?? "not exported", true]);
  return facts;
}

/** Shows the opened request's place on the timeline. */
function showOpened() {
  const running = known.running.find((request) => request.id === opened);
  const ended = known.ended.findLast((request) => request.id === opened);
  if (running ?? ended) showOnTimeline(running, ended);
}

/** Shows the place of a request on the timeline. */
function showOnTimeline(running, ended) {
  const request = running ?? ended;
  const [until, took] = running ? [known.clock.server, running.age] : [ended.at, ended.whole];
  const replica = replicas().find((replica) => replica.name === request.replica);
  if (replica && !devicesOf(replica).includes(chart.device)) chart.device = replica.device;
  chart.seek(request.id, until - took, until);
  location.hash = "#timeline";
}

function fillFacts(list, facts) {
  keyed(list, facts, ([name]) => name, ([name, , long]) => el("div", long ? { class: "long" } : null, el("dt", null, name), el("dd")), (row, [, text]) => say(row.lastElementChild, text));
}

function cell(label, name) {
  return el("td", { "data-label": label, class: name ?? null });
}

/** A request's id as a button that opens it. */
function opener(id) {
  const button = el("button", { type: "button", class: "open" }, id);
  button.addEventListener("click", () => openRequest(id));
  return button;
}

function renderRequests() {
  renderRequest();
  const running = known.running;
  show($("running"), running.length > 0);
  show($("running-none"), running.length === 0);
  say($("running-count"), running.length ? String(running.length) : "");
  keyed($("running").tBodies[0], running.slice(0, 200), (request) => `${request.replica} ${request.id}`, (request) => {
    const row = el("tr");
    row.parts = [cell("Request", "id"), cell("Phase"), cell("Time so far"), cell("Prompt", "n"), cell("Output", "n"), cell("Age", "n"), cell("Pages", "n")];
    row.name = opener(request.id);
    row.place = el("span", { class: "label" });
    row.pill = el("span", { class: "pill" });
    row.bar = el("div", { class: "barline", role: "img" });
    row.parts[0].append(row.name, row.place);
    row.parts[1].append(row.pill);
    row.parts[2].append(row.bar);
    row.append(...row.parts);
    return row;
  }, (row, request) => {
    row.name.setAttribute("aria-expanded", String(opened === request.id));
    say(row.place, request.replica + (request.preemptions ? ` · ${plural(request.preemptions, "preemption")}` : ""));
    row.pill.dataset.status = request.phase;
    row.dataset.phase = request.phase;
    say(row.pill, request.phase);
    bar(row.bar, request.queued, request.first_token, request.age, request.age);
    const cached = request.cached_tokens ? `, ${number(request.cached_tokens)} cached` : "";
    say(row.parts[3], request.phase === "prefill" ? `${number(request.prefilled_tokens)} of ${number(request.prompt_tokens)}${cached}` : `${number(request.prompt_tokens)}${cached}`);
    say(row.parts[4], `${number(request.output_tokens)} of ${number(request.max_tokens)}`);
    say(row.parts[5], length(request.age));
    say(row.parts[6], number(request.pages));
  });

  renderEnded();
}

const endedKey = (request) => `${request.at} ${request.id}`;
const failed = (request) => request.error !== null || request.reason === "error" || request.reason === "deadline_exceeded";
const endPill = (request) => el("span", { class: "pill", "data-status": failed(request) ? "error" : "ended" }, words(request.error ?? request.reason));

/** The ended requests: a table, or on a phone a line each, which unfolds. */
function renderEnded() {
  const keys = new Set(known.ended.map(endedKey));
  for (const key of unfolded) if (!keys.has(key)) unfolded.delete(key);
  const first = allEnded ? 0 : known.ended.length - FEW;
  const folds = PHONE.matches;
  // What somebody reads stays, however many end after it.
  const ended = known.ended.filter((request, index) => index >= first || (folds && unfolded.has(endedKey(request)))).reverse();
  show($("ended-more"), known.ended.length > FEW);
  say($("ended-more"), allEnded ? `Show the last ${FEW}` : `Show all ${known.ended.length} that are kept`);
  show($("ended"), !folds && ended.length > 0);
  show($("ended-lines"), folds && ended.length > 0);
  show($("ended-none"), ended.length === 0);
  say($("ended-count"), known.ended.length > ended.length ? `the last ${known.ended.length - first}` : "");
  const longest = Math.max(...ended.map((request) => request.whole), 1);
  keyed($("ended-lines"), folds ? ended : [], endedKey, endedLine, (line, request) => {
    if (!line.open) return;
    bar(line.bar, request.queue, request.first_token, request.whole, longest);
    fillFacts(line.facts, requestFacts(null, request));
  });
  keyed($("ended").tBodies[0], folds ? [] : ended, endedKey, (request) => {
    const row = el("tr");
    row.bar = el("div", { class: "barline", role: "img" });
    const cells = [
      ["Request", "id", (row.name = opener(request.id)), el("span", { class: "label" }, `${request.replica} · ${words(request.operation)}`)],
      ["End", null, endPill(request)],
      ["Time", null, row.bar],
      ["Queue", "n", length(request.queue)],
      ["First token", "n", length(request.first_token)],
      ["A token", "n", length(request.per_token)],
      ["In all", "n", length(request.whole)],
      ["Tokens in → out", "n", `${number(request.input_tokens)} → ${number(request.output_tokens)}`],
    ];
    for (const [label, name, ...content] of cells) {
      const td = cell(label, name);
      td.append(...content);
      row.append(td);
    }
    return row;
  }, (row, request) => {
    row.name.setAttribute("aria-expanded", String(opened === request.id));
    bar(row.bar, request.queue, request.first_token, request.whole, longest);
  });
}

/** An ended request as a line of id, model, end and time; unfolded, its bar and its facts follow. */
function endedLine(request) {
  const line = el("details");
  const part = (name, text) => el("span", { class: name, title: text }, text);
  line.bar = el("div", { class: "barline", role: "img" });
  line.facts = el("dl", { class: "facts" });
  const timeline = el("button", { type: "button" }, "Show on the timeline");
  timeline.addEventListener("click", () => showOnTimeline(null, request));
  const summary = el("summary", null, part("id", request.id), part("model", request.model), endPill(request), part("took", length(request.whole)));
  line.append(summary, el("div", null, el("p", { class: "whole" }, request.id), line.bar, line.facts, timeline));
  line.open = unfolded.has(endedKey(request));
  line.addEventListener("toggle", () => {
    if (line.open) unfolded.add(endedKey(request));
    else unfolded.delete(endedKey(request));
    renderEnded();
  });
  return line;
}

/** Queue, prefill and decode of a request, against `whole`. */
function bar(element, queue, first, until, whole) {
  const prefill = Math.max(0, (first ?? until) - queue);
  const decode = first === null ? 0 : Math.max(0, until - first);
  fill(element, [
    ["queue", queue / whole, `queue ${length(queue)}`],
    ["prefill", prefill / whole, `prefill ${length(prefill)}`],
    ["decode", decode / whole, `decode ${length(decode)}`],
  ]);
  element.setAttribute("aria-label", `queue ${length(queue)}, prefill ${length(prefill)}, decode ${length(decode)}`);
}

// ---- Canvas ------------------------------------------------------------------------------------------------------

let colours = new Map();
function colour(name) {
  if (!colours.has(name)) colours.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

/** The canvas in its own pixels; `null` while it is not on the screen. */
function canvasOf(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  if (width < 2 || height < 2) return null;
  const scale = devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return { context, width, height };
}

// ---- Timeline ----------------------------------------------------------------------------------------------------

const AXIS = 26;
const TITLE = 19;
const FLUSHES = { readback: "▾", phase_boundary: "┃", cross_queue: "◆" };
const SHORTEST = 10;
const LONGEST = 300 * SECOND;

const chart = {
  canvas: null,
  device: null,
  live: true,
  /** Microseconds in the window, and where it begins. */
  span: 0.4 * SECOND,
  /** The window's length was chosen: by what a plan takes, or by hand. */
  spanned: false,
  from: 0,
  lanes: [],
  boxes: [],
  submissions: [],
  transfersByPoint: new Map(),
  /** The chosen box's key, and the lane that the keyboard is in. */
  chosen: null,
  hovered: null,
  lane: null,
  /** The end of the last thing that happened. */
  last: 0,
  pointers: new Map(),
  frame: 0,
  /** What is searched for, in lower case; empty: nothing. */
  wanted: "",
  found: [],

  forget() {
    this.chosen = null;
    this.hovered = null;
    this.boxes = [];
    this.detail();
  },

  start() {
    this.canvas = $("chart");
    const c = this.canvas;
    c.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    c.addEventListener("pointerdown", (event) => this.down(event));
    c.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) c.addEventListener(name, (event) => this.up(event));
    c.addEventListener("pointerleave", () => { if (this.pointers.size === 0) this.hover(null); });
    c.addEventListener("keydown", (event) => this.key(event));
    c.addEventListener("focus", () => this.redraw());
    c.addEventListener("blur", () => this.redraw());
    $("live").addEventListener("click", () => this.follow(!this.live));
    $("zoom-in").addEventListener("click", () => this.zoom(0.5));
    $("zoom-out").addEventListener("click", () => this.zoom(2));
    $("pan-left").addEventListener("click", () => this.pan(-0.25));
    $("pan-right").addEventListener("click", () => this.pan(0.25));
    $("find").addEventListener("input", (event) => { this.wanted = event.target.value.trim().toLowerCase(); this.search(); this.redraw(); });
    $("find").addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.next(event.shiftKey ? -1 : 1);
    });
    $("save").addEventListener("click", () => this.save());
    $("device").addEventListener("change", (event) => { this.device = Number(event.target.value); this.forget(); this.update(); });
    new ResizeObserver(() => this.redraw()).observe(c);
    $("chart-legend").append(
      ...[["prefill", "prefill"], ["decode", "decode"], ["other", "other work"], ["host", "handing over"], ["seen", "done, not yet seen"], ["transfer", "transfer"]]
        .map(([name, text]) => el("li", null, el("i", { class: `swatch ${name}` }), text)),
      ...Object.entries(FLUSHES).map(([name, glyph]) => el("li", null, el("i", { class: `swatch mark ${name}` }, glyph), `flush: ${words(name)}`)),
      el("li", null, el("i", { class: "swatch mark cross_queue" }, "◇"), "waits for another queue"),
    );
  },

  /** Takes in what is new. */
  update() {
    const devices = known.state?.devices ?? [];
    if (!devices.some((device) => device.index === this.device)) this.device = devices[0]?.index ?? null;
    show($("device-pick"), devices.length > 1);
    keyed($("device"), devices, (device) => device.index, (device) => el("option", { value: device.index }), (option, device) => say(option, `${device.index}: ${device.name}`));
    if (this.device !== null && $("device").value !== String(this.device)) $("device").value = String(this.device);
    if (view() !== "timeline" || this.device === null) return;
    this.collect();
    this.settle();
    this.redraw();
  },

  collect() {
    const here = replicas().filter((replica) => devicesOf(replica).includes(this.device)).map((replica) => replica.name);
    const lanes = here.map((name) => ({ id: `engine ${name}`, title: `engine ${name}`, about: "plans: made → tokens taken in", rows: 2, row: 17 }));
    lanes.push(
      { id: "enqueue", title: "compute actor", about: "hands work to the driver", rows: 1, row: 15 },
      { id: "compute", title: "compute queue", about: "runs regions on the device", rows: 1, row: 30, strip: 18 },
      { id: "watcher", title: "watcher", about: "device done → host has seen it", rows: 1, row: 15 },
      { id: "staging", title: "transfer actor", about: "hands copies to the driver", rows: 1, row: 15 },
      { id: "transfer", title: "transfer queue", about: "copies, fills and readbacks", rows: 1, row: 20 },
    );
    let y = AXIS;
    for (const lane of lanes) {
      lane.y = y + TITLE;
      lane.height = lane.rows * (lane.row + 2) + (lane.strip ?? 0);
      y = lane.y + lane.height + 7;
    }
    this.lanes = lanes;
    const height = `${y}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;

    const boxes = [];
    const submissions = [];
    for (const name of here) {
      const ends = [];
      for (const step of known.steps.get(name)?.steps ?? []) {
        let row = ends.findIndex((end) => end <= step.planned);
        if (row < 0) row = ends.length < 2 ? ends.length : ends[0] <= ends[1] ? 0 : 1;
        ends[row] = step.taken;
        const key = `${name} ${step.number}`;
        const what = step.phase === "decode" ? `decode ×${step.steps} · ${plural(step.rows, "row")}` : `${step.phase} · ${plural(step.rows, "token")}`;
        boxes.push({ key, lane: `engine ${name}`, row, begin: step.planned, end: step.taken, kind: kind(step.phase), label: what, step, replica: name, what: "plan" });
        // A replica that is split over several devices has submissions to others too.
        const split = new Set(step.submissions.map((submission) => submission.device)).size > 1;
        step.submissions.forEach((submission, index) => (!split || submission.device === this.device) && this.submission(boxes, submissions, `${key} ${index}`, submission, step, name));
      }
    }
    this.transfersByPoint.clear();
    for (const transfer of known.transfers.get(this.device)?.transfers ?? []) {
      // A transfer that was not timed is known from the host's side only.
      const [begin, end] = [transfer.begin ?? transfer.enqueue[1], transfer.end ?? transfer.seen];
      const common = { row: 0, transfer };
      boxes.push({ ...common, key: `transfer ${transfer.number} enqueue`, lane: "staging", begin: transfer.enqueue[0], end: transfer.enqueue[1], kind: "host", label: "enqueue", what: "transfer enqueue" });
      boxes.push({ ...common, key: `transfer ${transfer.number}`, lane: "transfer", begin, end, kind: "transfer", label: `${transfer.what} ${bytes(transfer.bytes)}`, what: "transfer" });
      this.transfersByPoint.set(transfer.point.value, transfer);
    }
    boxes.sort((a, b) => a.begin - b.begin);
    this.boxes = boxes;
    this.submissions = submissions;
    const last = boxes.reduce((latest, box) => Math.max(latest, box.end), 0);
    this.last = last;
    document.body.dataset.boxes = boxes.length;
    const plans = boxes.filter((box) => box.what === "plan").slice(-32);
    if (!this.spanned && plans.length > 1) {
      // Some twenty plans, two of them at a time.
      this.spanned = true;
      const one = plans.reduce((sum, box) => sum + box.end - box.begin, 0) / plans.length;
      this.span = Math.min(Math.max(one * 10, 0.01 * SECOND), 30 * SECOND);
    }
    if (this.chosen && !boxes.some((box) => box.key === this.chosen)) this.choose(null);
    this.search();
  },

  // -- Searching and saving

  matches(box) {
    const texts = [box.label, box.replica ?? "", ...(box.step?.requests ?? [])];
    return texts.some((text) => text.toLowerCase().includes(this.wanted));
  },

  search() {
    this.found = this.wanted === "" ? [] : this.boxes.filter((box) => this.matches(box));
    const of = this.found.findIndex((box) => box.key === this.chosen);
    const place = of < 0 ? "" : `${number(of + 1)} of `;
    say($("find-count"), this.wanted === "" ? "" : `${place}${plural(this.found.length, "box").replace("boxs", "boxes")}`);
  },

  /** Chooses the next box that was found, after the chosen one or from the window's begin. */
  next(by) {
    if (this.found.length === 0) return;
    if (this.live) this.follow(false);
    const now = this.found.findIndex((box) => box.key === this.chosen);
    const here = this.found.findIndex((box) => box.end >= this.from);
    const index = now < 0 ? (here < 0 ? this.found.length - 1 : here) : (now + by + this.found.length) % this.found.length;
    this.choose(this.found[index]);
    this.search();
  },

  /** Shows the time from `begin` to `end`, in which the request `id` ran. */
  seek(id, begin, end) {
    this.follow(false);
    this.spanned = true;
    this.span = Math.min(Math.max((end - begin) * 1.15, SHORTEST), LONGEST);
    this.from = (begin + end) / 2 - this.span / 2;
    this.choose(null, false);
    $("find").value = id;
    this.wanted = id.toLowerCase();
  },

  /** Saves the kept boxes in the JSON format of trace events, which Perfetto and Chrome open. */
  save() {
    const events = [{ ph: "M", pid: 1, name: "process_name", args: { name: known.state.devices.find((device) => device.index === this.device)?.name ?? "device" } }];
    const threads = new Map();
    for (const lane of this.lanes) {
      for (let row = 0; row < lane.rows; row += 1) {
        const tid = threads.size + 1;
        threads.set(`${lane.id} ${row}`, tid);
        events.push({ ph: "M", pid: 1, tid, name: "thread_name", args: { name: lane.rows > 1 ? `${lane.title} (${row + 1})` : lane.title } });
        events.push({ ph: "M", pid: 1, tid, name: "thread_sort_index", args: { sort_index: tid } });
      }
    }
    for (const box of this.boxes) {
      const args = Object.fromEntries(explain(box).facts.map(([name, text]) => [name, text]));
      events.push({ ph: "X", pid: 1, tid: threads.get(`${box.lane} ${box.row}`), name: box.label, cat: box.kind, ts: box.begin, dur: Math.max(box.end - box.begin, 0), args });
    }
    const file = new Blob([JSON.stringify({ displayTimeUnit: "ms", traceEvents: events })], { type: "application/json" });
    const link = el("a", { href: URL.createObjectURL(file), download: `ostinato-${Math.round(known.state.now / SECOND)}s.perfetto.json` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    $("save").dataset.events = events.length;
  },

  submission(boxes, submissions, key, submission, step, replica) {
    const common = { submission, step, replica, row: 0 };
    boxes.push({ ...common, key: `${key} enqueue`, lane: "enqueue", begin: submission.enqueue[0], end: submission.enqueue[1], kind: "host", label: "enqueue", what: "enqueue" });
    submission.regions.forEach((region, index) => boxes.push({
      ...common, key: `${key} region ${index}`, lane: "compute", begin: region.begin, end: region.end, kind: kind(region.name),
      label: region.runs > 1 ? `${region.name} ×${region.runs}` : region.name, region, what: "region",
    }));
    const [first, last] = [submission.regions[0], submission.regions.at(-1)];
    // A submission that was not timed is known from the host's side only.
    const begin = first?.begin ?? submission.enqueue[1];
    const end = last?.end ?? submission.seen;
    if (!first) boxes.push({ ...common, key: `${key} whole`, lane: "compute", begin, end, kind: "other", label: `${submission.point.queue} ${submission.point.value} (not timed)`, what: "submission" });
    boxes.push({ ...common, key: `${key} seen`, lane: "watcher", begin: Math.min(end, submission.seen), end: submission.seen, kind: "seen", label: "seen", what: "seen" });
    submissions.push({ key, submission, step, begin, end });
  },

  // -- The window

  /** While it follows, the window ends now, or a little behind the last thing that happened. */
  settle() {
    if (!this.live) return;
    const now = serverNow() - 0.35 * SECOND;
    const end = this.last ? Math.min(now, this.last + this.span * 0.04) : now;
    this.from = end - this.span;
  },

  follow(live) {
    this.live = live;
    $("live").setAttribute("aria-pressed", String(live));
    say($("live"), live ? "Live" : "Paused");
    this.settle();
    this.redraw();
  },

  zoom(factor, at = 0.5) {
    const span = Math.min(Math.max(this.span * factor, SHORTEST), LONGEST);
    // What follows keeps its end; else the place under the pointer stays.
    this.from += this.live ? this.span - span : (this.span - span) * at;
    this.span = span;
    this.spanned = true;
    this.settle();
    this.redraw();
  },

  pan(share) {
    if (this.live) this.follow(false);
    this.from += this.span * share;
    this.redraw();
  },

  time(x) { return this.from + (x / this.canvas.clientWidth) * this.span; },

  // -- Pointers

  wheel(event) {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      this.pan(((event.deltaX || event.deltaY) * unit) / this.canvas.clientWidth);
    } else {
      this.zoom(Math.exp(event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.0022)), event.offsetX / this.canvas.clientWidth);
    }
  },

  down(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY, moved: 0 });
  },

  move(event) {
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) {
      this.hover(this.hit(event.offsetX, event.offsetY));
      return;
    }
    const dx = event.offsetX - pointer.x;
    if (this.pointers.size === 2) {
      const other = [...this.pointers].find(([id]) => id !== event.pointerId)[1];
      const before = Math.max(Math.abs(pointer.x - other.x), 8);
      const after = Math.max(Math.abs(event.offsetX - other.x), 8);
      this.zoom(before / after, (event.offsetX + other.x) / 2 / this.canvas.clientWidth);
    }
    pointer.moved += Math.abs(dx) + Math.abs(event.offsetY - pointer.y);
    if (this.pointers.size === 1 && pointer.moved > 4) this.pan(-dx / this.canvas.clientWidth);
    if (this.pointers.size === 1 && pointer.moved <= 4) return;
    pointer.x = event.offsetX;
    pointer.y = event.offsetY;
  },

  up(event) {
    const pointer = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!pointer || event.type === "pointercancel" || pointer.moved > 4) return;
    const box = this.hit(event.offsetX, event.offsetY);
    if (box && this.live) this.follow(false);
    this.choose(box, false);
  },

  hit(x, y) {
    const lane = this.lanes.find((lane) => y >= lane.y - TITLE && y < lane.y + lane.height + 7);
    if (!lane) return null;
    const [time, slack] = [this.time(x), (this.span / this.canvas.clientWidth) * 4];
    const row = Math.min(lane.rows - 1, Math.max(0, Math.floor((y - lane.y) / (lane.row + 2))));
    let best = null;
    let nearest = Infinity;
    for (const box of this.boxes) {
      if (box.begin > time + slack) break;
      if (box.lane !== lane.id || box.row !== row || box.end < time - slack) continue;
      const distance = Math.abs((box.begin + box.end) / 2 - time) - (box.begin <= time && time <= box.end ? this.span : 0);
      if (distance < nearest) [best, nearest] = [box, distance];
    }
    return best;
  },

  hover(box) {
    if (this.hovered === (box?.key ?? null)) return;
    this.hovered = box?.key ?? null;
    this.detail();
    this.redraw();
  },

  // -- Keys

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), "−": () => this.zoom(2),
      " ": () => this.follow(!this.live),
      Escape: () => this.choose(null),
      Enter: () => this.fit(),
      ArrowLeft: () => (event.shiftKey ? this.pan(-0.25) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.pan(0.25) : this.step(1)),
      ArrowUp: () => this.change(-1),
      ArrowDown: () => this.change(1),
      Home: () => this.edge(0),
      End: () => this.edge(-1),
    };
    const action = keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  },

  inLane(id) { return this.boxes.filter((box) => box.lane === id); },

  /** The next box of the lane, or the first in the middle of the window. */
  step(by) {
    const chosen = this.boxes.find((box) => box.key === this.chosen);
    const last = this.inLane(chosen?.lane ?? this.lane);
    const boxes = last.length ? last : this.inLane("compute");
    if (boxes.length === 0) return;
    if (this.live) this.follow(false);
    let index;
    if (chosen) index = boxes.indexOf(chosen) + by;
    else {
      // The last that can be seen.
      index = boxes.findLastIndex((box) => box.begin < this.from + this.span);
    }
    this.choose(boxes[Math.min(Math.max(index, 0), boxes.length - 1)]);
  },

  edge(at) {
    const chosen = this.boxes.find((box) => box.key === this.chosen);
    const box = this.inLane(chosen?.lane ?? "compute").at(at);
    if (!box) return;
    if (this.live) this.follow(false);
    this.choose(box);
  },

  /** The box of another lane that lies nearest. */
  change(by) {
    const chosen = this.boxes.find((box) => box.key === this.chosen);
    if (!chosen) return this.step(0);
    for (let index = this.lanes.findIndex((lane) => lane.id === chosen.lane) + by; this.lanes[index]; index += by) {
      const boxes = this.inLane(this.lanes[index].id);
      const related = (box) => box.step === chosen.step && (!chosen.submission || !box.submission || box.submission === chosen.submission);
      const same = boxes.filter((box) => (chosen.transfer ? box.transfer === chosen.transfer : chosen.step && related(box)));
      const from = same.length ? same : boxes;
      if (from.length === 0) continue;
      const distance = (box) => Math.abs(box.begin - chosen.begin);
      return this.choose(from.reduce((best, box) => (distance(box) < distance(best) ? box : best)));
    }
  },

  fit() {
    const box = this.boxes.find((box) => box.key === this.chosen);
    if (!box) return;
    if (this.live) this.follow(false);
    this.span = Math.min(Math.max((box.end - box.begin) * 1.6, SHORTEST), LONGEST);
    this.from = (box.begin + box.end) / 2 - this.span / 2;
    this.redraw();
  },

  choose(box, aloud = true) {
    this.chosen = box?.key ?? null;
    if (box) {
      this.lane = box.lane;
      const outside = box.end < this.from || box.begin > this.from + this.span;
      const partly = box.end - box.begin < this.span && (box.begin < this.from || box.end > this.from + this.span);
      if (outside || partly) this.from = (box.begin + box.end) / 2 - this.span / 2;
    }
    this.detail(aloud);
    this.redraw();
  },

  // -- Words about a box

  detail(aloud = false) {
    const named = (key) => this.boxes.find((box) => box.key === key);
    const box = named(this.hovered) ?? named(this.chosen);
    show($("detail-hint"), !box);
    show($("detail-facts"), !!box);
    $("detail").dataset.key = box?.key ?? "";
    if (!box) {
      say($("detail-title"), "Nothing chosen");
      if (aloud) say($("detail-said"), "nothing chosen");
      return;
    }
    const { title, facts } = explain(box);
    say($("detail-title"), title);
    fillFacts($("detail-facts"), facts);
    if (aloud) say($("detail-said"), `${title}. ${facts.slice(0, 4).map(([name, text]) => `${name}: ${text}`).join(". ")}`);
  },

  // -- Drawing

  redraw() {
    if (this.frame || view() !== "timeline") return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
      // Smooth only while something moves, and not for those who want it still.
      if (this.live && !STILL.matches && !gone && !document.hidden && this.moving()) {
        this.settle();
        this.redraw();
      }
    });
  },

  moving() { return serverNow() - 0.35 * SECOND < this.last + this.span * 0.04; },

  draw() {
    const draw = canvasOf(this.canvas);
    if (!draw) return;
    const { context: c, width, height } = draw;
    const x = (time) => ((time - this.from) / this.span) * width;
    c.clearRect(0, 0, width, height);
    c.textBaseline = "middle";
    this.axis(c, x, width, height);
    for (const lane of this.lanes) {
      c.strokeStyle = colour("line");
      c.beginPath();
      c.moveTo(0, lane.y + lane.height + 3.5);
      c.lineTo(width, lane.y + lane.height + 3.5);
      c.stroke();
    }
    const end = this.from + this.span;
    const lanes = new Map(this.lanes.map((lane) => [lane.id, lane]));
    const drawn = new Map();
    let count = 0;
    c.font = "11.5px system-ui, sans-serif";
    let chosen = null;
    for (const box of this.boxes) {
      if (box.begin > end) break;
      if (box.end < this.from) continue;
      count += 1;
      const lane = lanes.get(box.lane);
      if (!lane) continue;
      const left = Math.max(x(box.begin), -2);
      const right = Math.max(Math.min(x(box.end), width + 2), left + 1.5);
      // What is narrower than a pixel is drawn once a pixel.
      const place = `${box.lane} ${box.row}`;
      if (right - left < 2 && Math.floor(left) === drawn.get(place) && box.key !== this.chosen) continue;
      drawn.set(place, Math.floor(left));
      c.globalAlpha = this.wanted === "" || this.matches(box) ? 1 : 0.25;
      this.box(c, box, left, right, lane, width);
      c.globalAlpha = 1;
      if (box.key === this.chosen || box.key === this.hovered) chosen = { box, left, right, lane };
    }
    this.links(c, x, lanes, width);
    this.titles(c, width);
    if (chosen) this.outline(c, chosen);
    this.sum(end);
    show($("chart-empty"), this.boxes.length === 0 || count === 0);
    say($("chart-empty"), this.boxes.length === 0 ? "Nothing has run on this device yet." : "Nothing ran in this time. End jumps to the last thing that did.");
    this.canvas.dataset.drawn = count;
    this.canvas.dataset.from = this.from.toFixed(3);
    this.canvas.dataset.span = this.span.toFixed(3);
    this.canvas.dataset.live = this.live;
    this.canvas.dataset.chosen = this.chosen ?? "";
    const idle = this.last && serverNow() - this.last > 2 * SECOND ? ` · idle for ${length(serverNow() - this.last)}` : "";
    say($("window"), `${length(this.span)} in the window${this.live ? idle : ""}`);
  },

  /** Over what joins the lanes, with a rim that keeps them readable. */
  titles(c, width) {
    c.textAlign = "left";
    c.lineJoin = "round";
    for (const lane of this.lanes) {
      let at = 10;
      for (const [text, font, ink] of [[lane.title, "600 12px system-ui, sans-serif", "ink"], [width > 560 ? lane.about : "", "12px system-ui, sans-serif", "muted"]]) {
        c.font = font;
        c.strokeStyle = colour("surface");
        c.lineWidth = 4;
        c.strokeText(text, at, lane.y - TITLE / 2);
        c.fillStyle = colour(ink);
        c.fillText(text, at, lane.y - TITLE / 2);
        at += c.measureText(text).width + 10;
      }
    }
    c.lineWidth = 1;
  },

  axis(c, x, width, height) {
    const rough = this.span / Math.max(2, width / 130);
    const power = 10 ** Math.floor(Math.log10(rough));
    const tick = [1, 2, 5, 10].map((factor) => factor * power).find((tick) => tick >= rough);
    const digits = Math.max(0, Math.ceil(6 - Math.log10(tick) - 1e-9));
    c.font = "11px system-ui, sans-serif";
    c.textAlign = "left";
    for (let time = Math.ceil(this.from / tick) * tick; time < this.from + this.span; time += tick) {
      const at = Math.round(x(time)) + 0.5;
      c.strokeStyle = colour("grid");
      c.beginPath();
      c.moveTo(at, 0);
      c.lineTo(at, height);
      c.stroke();
      c.fillStyle = colour("muted");
      c.fillText(`${(time / SECOND).toFixed(digits)} s`, at + 4, 12);
    }
  },

  box(c, box, left, right, lane, width) {
    const top = lane.y + box.row * (lane.row + 2);
    const [w, h] = [right - left, lane.row];
    c.fillStyle = colour(box.kind);
    c.strokeStyle = colour(`${box.kind}-edge`);
    c.lineWidth = 1;
    if (w > 5) {
      c.beginPath();
      c.roundRect(left + 0.5, top + 0.5, w - 1, h - 1, 3);
      c.fill();
      c.stroke();
    } else {
      c.fillStyle = colour(`${box.kind}-edge`);
      c.fillRect(left, top, Math.max(w, 1.5), h);
    }
    const [from, to] = [Math.max(left, 0) + 6, Math.min(right, width) - 6];
    if (to - from > 26) {
      const text = fitText(c, box.label, to - from);
      c.fillStyle = colour("box-ink");
      c.textAlign = "left";
      if (text) c.fillText(text, from, top + h / 2 + 0.5);
    }
  },

  outline(c, { box, left, right, lane }) {
    const top = lane.y + box.row * (lane.row + 2);
    c.strokeStyle = box.key === this.chosen ? colour("focus") : colour("ink");
    c.lineWidth = box.key === this.chosen ? 3 : 1.5;
    c.beginPath();
    c.roundRect(left - 1, top - 1, right - left + 2, lane.row + 2, 4);
    c.stroke();
    c.lineWidth = 1;
  },

  /** What joins the lanes: submit, seen, waits; and why each submission ended. */
  links(c, x, lanes, width) {
    const visible = this.submissions.filter(({ submission, end }) => submission.enqueue[0] < this.from + this.span && Math.max(end, submission.seen) > this.from);
    const [enqueue, compute, watcher, transfer] = ["enqueue", "compute", "watcher", "transfer"].map((id) => lanes.get(id));
    const apart = width / Math.max(1, visible.length);
    const strip = compute.y + compute.row + 12;
    const focus = this.boxes.find((box) => box.key === (this.hovered ?? this.chosen));
    for (const { submission, begin, end, step } of visible) {
      const marked = focus && (focus.submission ? focus.submission === submission : focus.step === step);
      if (apart > 26 || marked) {
        c.strokeStyle = marked ? colour("focus") : colour("muted");
        c.globalAlpha = marked ? 1 : 0.55;
        c.lineWidth = marked ? 1.75 : 1;
        arrow(c, x(submission.enqueue[1]), enqueue.y + enqueue.row, x(begin), compute.y);
        arrow(c, x(end), compute.y + compute.row, x(submission.seen), watcher.y);
        c.globalAlpha = 1;
        c.lineWidth = 1;
      }
      if (apart > 9 || marked) {
        c.fillStyle = colour(submission.flush);
        c.textAlign = "right";
        const room = x(end) - x(begin);
        const text = `${words(submission.flush)} ${FLUSHES[submission.flush]}`;
        c.fillText(room > c.measureText(text).width + 14 ? text : FLUSHES[submission.flush], x(end) + 3, strip);
      }
      for (const wait of submission.waits) {
        const source = wait.queue === "transfer" ? this.transfersByPoint.get(wait.value) : null;
        c.fillStyle = colour("cross_queue");
        c.textAlign = "left";
        c.fillText(apart > 150 ? `◇ ${wait.queue} ${wait.value}` : "◇", x(begin) - 3, strip);
        if (source) {
          c.strokeStyle = colour("cross_queue");
          arrow(c, x(source.end ?? source.seen), transfer.y, x(begin), compute.y + compute.row);
        }
      }
    }
  },

  /** What can be counted in the window. */
  sum(end) {
    let busy = 0;
    let until = this.from;
    let gap = 0;
    let count = 0;
    let clock = null;
    const flushes = {};
    for (const box of this.boxes) {
      if (box.lane !== "compute" || box.end < this.from) continue;
      if (box.begin > end) break;
      const [a, b] = [Math.max(box.begin, until), Math.min(box.end, end)];
      if (box.begin > until && until > this.from) gap = Math.max(gap, box.begin - until);
      if (b > a) busy += b - a;
      until = Math.max(until, b);
    }
    for (const { submission, begin, end: ends } of this.submissions) {
      if (ends < this.from || begin > end) continue;
      count += 1;
      flushes[submission.flush] = (flushes[submission.flush] ?? 0) + 1;
      if (submission.clock && !(clock?.error_us > submission.clock.error_us)) clock = submission.clock;
    }
    const parts = [`compute queue busy ${((busy / this.span) * 100).toFixed(0)} %`, gap < 1 ? "no gap" : `longest gap ${length(gap)}`, plural(count, "submission")];
    for (const [name, times] of Object.entries(flushes)) parts.push(`${times} × ${words(name)}`);
    if (clock) parts.push(`device clock ${clock.quality}, within ${length(clock.error_us)}`);
    say($("chart-sum"), count ? `In the window: ${parts.join(" · ")}` : "");
  },
};

const kind = (name) => (/^(decode|verify)/.test(name) ? "decode" : /^(prefill|head)/.test(name) ? "prefill" : "other");

function fitText(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let shorter = text;
  while (shorter.length > 1 && c.measureText(`${shorter}…`).width > room) shorter = shorter.slice(0, -1);
  return shorter.length > 2 ? `${shorter}…` : "";
}

function arrow(c, x0, y0, x1, y1) {
  c.beginPath();
  c.moveTo(x0, y0);
  c.lineTo(x1, y1);
  const angle = Math.atan2(y1 - y0, x1 - x0);
  for (const turn of [2.6, -2.6]) {
    c.moveTo(x1, y1);
    c.lineTo(x1 + 5 * Math.cos(angle + turn), y1 + 5 * Math.sin(angle + turn));
  }
  c.stroke();
}

/** A box in words: a title, and `[name, value, long?]`, the most telling first. */
function explain(box) {
  const took = length(box.end - box.begin);
  const at = `${(box.begin / SECOND).toFixed(6)} s`;
  if (box.what === "transfer enqueue") {
    const { transfer } = box;
    return { title: `Transfer ${transfer.point.value} is handed to the driver`, facts: [["Took", took], ["Bytes", bytes(transfer.bytes)], ["Copies", number(transfer.copies)], ["Begins", at]] };
  }
  if (box.what === "transfer") {
    const { transfer } = box;
    const timed = transfer.begin !== null;
    const facts = [["Bytes", bytes(transfer.bytes)], [timed ? "Took" : "From submission to seen", took], ["Copies", number(transfer.copies)], ["Reaches", `transfer ${transfer.point.value}`]];
    if (timed) facts.push(["Speed", `${bytes((transfer.bytes / Math.max(box.end - box.begin, 0.001)) * SECOND)}/s`], ["Seen after", length(Math.max(0, transfer.seen - box.end))]);
    if (transfer.clock) facts.push(["Clock", `${transfer.clock.quality}, within ${length(transfer.clock.error_us)}`]);
    facts.push(["Begins", at]);
    if (transfer.waits.length) facts.push(["Waited for", points(transfer.waits)]);
    return { title: `Transfer: ${transfer.what}`, facts };
  }
  const { step, submission } = box;
  if (box.what === "plan") {
    const facts = [
      ["In flight", took], ["Tokens drawn", number(step.tokens)],
      step.phase === "decode" ? ["Rows × steps", `${step.rows} × ${step.steps}`] : ["Prompt tokens", number(step.rows)],
      ["Submissions", number(step.submissions.length)], ["Device time", length(step.cost.gpu_us)], ["Planning", length(step.cost.schedule_us)],
      ["Enqueueing", length(step.cost.enqueue_us)], ["Handing tokens out", length(step.cost.deliver_us)], ["Barriers", number(step.cost.barriers)],
      ["Dispatches", number(step.cost.dispatches)], ["Host waits", number(step.cost.host_waits)], ["Begins", at],
      ["After it", `${step.running} running, ${step.waiting} waiting, ${plural(step.pages_used, "page")} in use`],
    ];
    const ids = step.requests.slice(0, 8).join(", ") + (step.requests.length > 8 ? ` and ${step.requests.length - 8} more` : "");
    facts.push(["Requests", ids || "all had ended", true]);
    return { title: `Plan ${step.number} of ${box.replica}: ${step.phase}`, facts };
  }
  const plan = ["Plan", `${step.number} of ${box.replica}`];
  const flush = ["Flush", words(submission.flush)];
  const point = ["Reaches", `${submission.point.queue} ${submission.point.value}`];
  if (box.what === "enqueue") {
    return { title: `Submission ${submission.point.value} is handed to the driver`, facts: [["Took", took], plan, flush, point, ["Begins", at]] };
  }
  if (box.what === "seen") {
    return { title: `Submission ${submission.point.value} is seen`, facts: [["After its end", took], plan, flush, point, ["Host waits", number(submission.host_waits)], ["Seen at", `${(box.end / SECOND).toFixed(6)} s`]] };
  }
  const facts = [["Took", took]];
  if (box.region && box.region.runs > 1) facts.push(["A run", length((box.end - box.begin) / box.region.runs)]);
  facts.push(plan, flush, point, ["Waited for", submission.waits.length ? points(submission.waits) : "nothing"]);
  facts.push(["Seen after", length(Math.max(0, submission.seen - box.end))]);
  facts.push(["In its submission", `${plural(submission.dispatches, "dispatch").replace("dispatchs", "dispatches")}, ${plural(submission.barriers, "barrier")}`]);
  if (submission.clock) facts.push(["Clock", `${submission.clock.quality}, within ${length(submission.clock.error_us)}`]);
  facts.push(["Begins", at]);
  const runs = box.region && box.region.runs > 1 ? `, ${box.region.runs} runs` : "";
  return { title: box.region ? `Region ${box.region.name}${runs}` : `Submission ${submission.point.value}, not timed`, facts };
}

const points = (list) => list.map((point) => `${point.queue} ${point.value}`).join(", ");

// ---- The loop ----------------------------------------------------------------------------------------------------

let gone = false;
let failures = 0;

function lost() {
  failures += 1;
  gone = true;
  document.body.dataset.gone = "";
  $("status").dataset.status = "gone";
  say($("status"), "gone");
  show($("gone"), true);
  say($("gone"), known.state ? "The server does not answer. What you see is what it said last. Trying again…" : "The server does not answer. Trying again…");
}

function back() {
  failures = 0;
  gone = false;
  delete document.body.dataset.gone;
  show($("gone"), known.incomplete);
  if (known.incomplete) say($("gone"), "The server answers, but an engine thread does not: some of this is older than it looks.");
}

/** Ends the pause before the next question to the server. */
let poll = () => {};
const sleep = (ms) => new Promise((resolve) => {
  poll = resolve;
  setTimeout(resolve, ms);
});
const visible = () => new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));

async function main() {
  chart.start();
  makeHistory();
  makeChat();
  $("request-close").addEventListener("click", () => openRequest(opened));
  $("request-timeline").addEventListener("click", showOpened);
  $("ended-more").addEventListener("click", () => {
    allEnded = !allEnded;
    renderRequests();
  });
  addEventListener("hashchange", () => {
    if (known.state) render();
    poll();
    scrollTo(0, 0);
  });
  PHONE.addEventListener("change", () => { if (known.state) renderEnded(); });
  DARK.addEventListener("change", () => {
    colours = new Map();
    if (known.state) render();
  });
  addEventListener("resize", () => { if (known.state?.status && known.state.status !== "loading") history(); });
  route();
  for (;;) {
    // Nobody looks: nobody asks.
    while (document.hidden) await visible();
    try {
      await ask();
      back();
      render();
    } catch (error) {
      if (error instanceof Gone) lost();
      else console.error(error);
    }
    document.body.dataset.polls = Number(document.body.dataset.polls ?? 0) + 1;
    await sleep(gone ? Math.min(500 * 2 ** failures, 5000) : known.state?.status === "loading" || view() === "timeline" ? 500 : 1000);
  }
}

// The other scripts have run by then.
addEventListener("DOMContentLoaded", main);

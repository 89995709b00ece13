// The History view: charts of the last hour from the server's samples (/api/history), drawn on canvases. page.js has the
// shared functions and asks for the data.
"use strict";

/** How many samples are kept: those of an hour. */
const KEPT_SAMPLES = 720;
const MARGIN = { left: 58, right: 8, top: 8, bottom: 20 };

const past = {
  samples: [],
  since: 0,
  /** Seconds that the charts show. */
  range: 3600,
};

async function askHistory() {
  const found = await get(`/api/history?since=${past.since}`);
  // A moment goes through microseconds with three digits: the last sample may come twice.
  past.samples.push(...found.samples.filter((sample) => sample.at > past.since));
  past.samples.splice(0, Math.max(0, past.samples.length - KEPT_SAMPLES));
  past.since = past.samples.at(-1)?.at ?? 0;
}

function forgetHistory() {
  past.samples = [];
  past.since = 0;
}

const perSecond = (field) => (sample) => (sample[field] / sample.length) * SECOND;
const quantile = (field, which) => (sample) => sample[field]?.[which] ?? null;
const share = (sample) => (sample.pages_total ? (sample.pages_used / sample.pages_total) * 100 : 0);

/** The charts: a title, how its values are told, and its lines (`name`, colour, value of a sample). */
const CHARTS = [
  { id: "output", title: "Output tokens per second", text: rateText, lines: [["output", "accent", perSecond("output_tokens")]] },
  { id: "prompt", title: "Prompt tokens per second", text: rateText, lines: [["computed", "prefill-edge", perSecond("prompt_tokens")]] },
  { id: "first", title: "Time to first token", text: length, lines: [["p50", "accent", quantile("first_token", "p50")], ["p95", "cross_queue", quantile("first_token", "p95")]] },
  { id: "token", title: "Time per token", text: length, lines: [["p50", "accent", quantile("per_token", "p50")], ["p95", "cross_queue", quantile("per_token", "p95")]] },
  { id: "gap", title: "Gap between tokens", text: length, lines: [["p50", "accent", quantile("gap", "p50")], ["p95", "cross_queue", quantile("gap", "p95")]] },
  { id: "load", title: "Requests", text: rateText, lines: [["running", "accent", (sample) => sample.running], ["waiting", "queue-edge", (sample) => sample.waiting]] },
  { id: "pages", title: "KV pages in use", text: (value) => `${value.toFixed(value < 10 ? 1 : 0)} %`, most: 100, lines: [["in use", "kv-pages", share]] },
  { id: "errors", title: "Failed and refused requests per minute", text: rateText, lines: [["failed", "bad", (sample) => perSecond("failed")(sample) * 60], ["refused", "queue-edge", (sample) => perSecond("refused")(sample) * 60]] },
];

function makeHistory() {
  for (const chart of CHARTS) {
    const card = el("article", { class: "card plot", id: `plot-${chart.id}` });
    chart.canvas = el("canvas", { tabindex: "0", role: "img" });
    chart.said = el("p", { class: "sub", "aria-live": "off" });
    const legend = el("ul", { class: "legend" });
    for (const [name, ink] of chart.lines) {
      const key = el("i", { class: "key" });
      key.ink = ink;
      legend.append(el("li", null, key, name));
    }
    chart.keys = legend.querySelectorAll(".key");
    card.append(el("div", { class: "spread" }, el("h2", null, chart.title), legend), chart.canvas, chart.said);
    $("plots").append(card);
    const canvas = chart.canvas;
    canvas.addEventListener("pointermove", (event) => point(chart, event.offsetX));
    canvas.addEventListener("pointerleave", () => point(chart, null));
    canvas.addEventListener("blur", () => point(chart, null));
    canvas.addEventListener("keydown", (event) => stepPoint(chart, event));
    new ResizeObserver(() => { if (view() === "history") plot(chart); }).observe(canvas);
  }
  $("range").addEventListener("change", (event) => {
    past.range = Number(event.target.value);
    renderHistory();
  });
}

function renderHistory() {
  if (view() !== "history") return;
  show($("history-none"), past.samples.length === 0);
  for (const chart of CHARTS) plot(chart);
}

/** The least of 1, 2 and 5 times a power of ten that is not below `value`. */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((nice) => nice >= value * (1 - 1e-9));
}

/** The samples of the range, and where a time and a sample's index lie in it. */
function frame(chart) {
  const end = Math.max(past.samples.at(-1)?.at ?? 0, known.clock.server);
  const begin = end - past.range * SECOND;
  const samples = past.samples.filter((sample) => sample.at > begin);
  const width = chart.canvas.clientWidth - MARGIN.left - MARGIN.right;
  return { samples, begin, end, x: (time) => MARGIN.left + ((time - begin) / (end - begin)) * width };
}

function plot(chart) {
  const draw = canvasOf(chart.canvas);
  if (!draw) return;
  const { context: c, width, height } = draw;
  const { samples, begin, end, x } = frame(chart);
  const values = chart.lines.map(([, , value]) => samples.map(value));
  const largest = Math.max(0, ...values.flat().filter((value) => value !== null));
  const most = chart.most ?? (largest > 0 ? round(largest) : 1);
  const y = (value) => MARGIN.top + (1 - value / most) * (height - MARGIN.top - MARGIN.bottom);
  c.clearRect(0, 0, width, height);
  c.font = "11px system-ui, sans-serif";
  c.lineWidth = 1;
  c.textBaseline = "middle";
  for (const part of [0, 0.5, 1]) {
    const at = Math.round(y(most * part)) + 0.5;
    c.strokeStyle = colour(part === 0 ? "line" : "grid");
    c.beginPath();
    c.moveTo(MARGIN.left, at);
    c.lineTo(width - MARGIN.right, at);
    c.stroke();
    c.fillStyle = colour("muted");
    c.textAlign = "right";
    c.fillText(part === 0 ? "0" : chart.text(most * part), MARGIN.left - 6, at);
  }
  const minutes = past.range / 60;
  const tick = Math.max(1, minutes / (width > 420 ? 6 : 3));
  for (let ago = 0; ago <= minutes; ago += tick) {
    c.textAlign = ago === 0 ? "right" : ago === minutes ? "left" : "center";
    c.fillText(ago === 0 ? "now" : `−${number(ago)} min`, x(end - ago * 60 * SECOND), height - 8);
  }
  chart.lines.forEach(([, ink], line) => {
    c.strokeStyle = colour(ink);
    c.fillStyle = colour(ink);
    c.lineWidth = 1.6;
    c.lineJoin = "round";
    c.beginPath();
    let open = false;
    samples.forEach((sample, index) => {
      const value = values[line][index];
      if (value === null) {
        open = false;
        return;
      }
      const [at, level] = [x(sample.at), y(Math.min(value, most))];
      // A value between two samples without one is a point.
      const alone = !open && (values[line][index + 1] ?? null) === null;
      if (alone) c.fillRect(at - 1, level - 1, 2, 2);
      else if (open) c.lineTo(at, level);
      else c.moveTo(at, level);
      open = !alone;
    });
    c.stroke();
  });
  chart.keys.forEach((key) => { key.style.background = colour(key.ink); });
  const sample = chart.at === undefined ? null : samples.find((sample) => sample.at === chart.at) ?? null;
  if (sample) {
    c.strokeStyle = colour("focus");
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(x(sample.at), MARGIN.top);
    c.lineTo(x(sample.at), height - MARGIN.bottom);
    c.stroke();
  }
  const told = (sample) => chart.lines.map(([name, , value]) => `${name} ${value(sample) === null ? "–" : chart.text(value(sample))}`).join(", ");
  const last = samples.at(-1);
  const text = sample ? `${length(known.clock.server - sample.at)} ago: ${told(sample)}` : last ? `now: ${told(last)}` : "no sample yet";
  say(chart.said, text);
  chart.canvas.setAttribute("aria-label", `${chart.title}, the last ${number(minutes)} minutes. At most ${chart.text(largest)}; ${text}`);
  chart.canvas.dataset.samples = samples.length;
  chart.canvas.dataset.largest = largest;
}

/** Points at the sample nearest to `at`, in pixels of the canvas; at none if `null`. */
function point(chart, at) {
  const { samples, x } = frame(chart);
  const far = (sample) => Math.abs(x(sample.at) - at);
  const near = at === null || samples.length === 0 ? undefined : samples.reduce((best, sample) => (far(sample) < far(best) ? sample : best));
  if (chart.at === near?.at) return;
  chart.at = near?.at;
  plot(chart);
}

function stepPoint(chart, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") return point(chart, null);
  if (!by) return;
  event.preventDefault();
  const { samples } = frame(chart);
  if (samples.length === 0) return;
  const now = samples.findIndex((sample) => sample.at === chart.at);
  const next = now < 0 ? samples.length - 1 : Math.min(Math.max(now + by, 0), samples.length - 1);
  chart.at = samples[next].at;
  plot(chart);
}

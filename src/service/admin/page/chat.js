// The Chat view: a conversation with a served model through the endpoint of OpenAI's API, which has a port, limits and
// tokens of its own. What the model and the server say is shown as text. Nothing is kept when the page is closed.
"use strict";

const chat = {
  /** What was said: `{ role, content, item }`. */
  messages: [],
  /** Ends the answer that runs; `null` while none does. */
  running: null,
};

/** The address of the API; `null` if the server has none. */
function apiUrl() {
  const http = known.state?.http;
  return http ? `${http.scheme}://${http.host ?? location.hostname}:${http.port}` : null;
}

function makeChat() {
  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.running) chat.running.abort();
    else send();
  });
  $("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!chat.running) send();
  });
  $("chat-new").addEventListener("click", () => {
    chat.running?.abort();
    chat.messages = [];
    $("chat-log").replaceChildren();
    renderChat();
    $("chat-text").focus();
  });
}

function renderChat() {
  const state = known.state;
  const url = apiUrl();
  show($("chat-off"), url === null);
  show($("chat-main"), url !== null);
  show($("chat-token-row"), state.http?.tokens === true);
  keyed($("chat-model"), state.models, (model) => model.name, (model) => el("option", { value: model.name }), (option, model) => say(option, model.name));
  show($("chat-model-row"), state.models.length !== 1);
  show($("chat-hint"), chat.messages.length === 0);
  show($("chat-new"), chat.messages.length > 0);
  say($("chat-send"), chat.running ? "Stop" : "Send");
  $("chat-send").dataset.running = chat.running !== null;
}

/** The body of the request: empty fields leave the choice to the server. */
function chatBody() {
  const set = {};
  for (const [id, name] of [["chat-temperature", "temperature"], ["chat-top-p", "top_p"], ["chat-max", "max_completion_tokens"], ["chat-seed", "seed"]]) {
    if ($(id).value !== "") set[name] = Number($(id).value);
  }
  const system = $("chat-system").value.trim();
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  return { model: $("chat-model").value, messages, stream: true, stream_options: { include_usage: true }, ...set };
}

function addMessage(role, content) {
  const item = el("li", { class: role });
  item.thought = el("details", { hidden: "" }, el("summary", null, "Reasoning"), el("p", { class: "words" }));
  item.words = el("p", { class: "words" }, content);
  item.facts = el("p", { class: "sub" });
  item.append(el("p", { class: "label" }, role === "user" ? "You" : $("chat-model").value), item.thought, item.words, item.facts);
  $("chat-log").append(item);
  const message = { role, content, item };
  chat.messages.push(message);
  return message;
}

async function send() {
  const text = $("chat-text").value.trim();
  if (text === "") return;
  $("chat-text").value = "";
  addMessage("user", text);
  const body = chatBody();
  const answer = addMessage("assistant", "");
  const stop = new AbortController();
  chat.running = stop;
  renderChat();
  const told = { begun: performance.now(), first: null, last: null, usage: null, id: null, end: null };
  try {
    await stream(body, stop.signal, told, (delta) => {
      const follows = nearEnd();
      if (delta.reasoning_content) {
        show(answer.item.thought, true);
        answer.item.thought.lastElementChild.append(delta.reasoning_content);
      }
      if (delta.content) {
        answer.content += delta.content;
        answer.item.words.append(delta.content);
      }
      if (follows) scrollTo(0, document.body.scrollHeight);
    });
  } catch (error) {
    if (stop.signal.aborted) told.end = "stopped";
    else fail(answer.item, error);
  }
  chat.running = null;
  facts(answer.item, told);
  // The server would refuse an empty answer in the next request's history.
  if (answer.content === "") chat.messages = chat.messages.filter((message) => message !== answer);
  renderChat();
}

const nearEnd = () => innerHeight + scrollY > document.body.scrollHeight - 80;

function fail(item, error) {
  item.append(el("p", { class: "failed", role: "alert" }, error.message));
}

/** Reads the events of an answer (SSE) and calls `take` with each part of it. */
async function stream(body, signal, told, take) {
  const headers = { "content-type": "application/json" };
  if ($("chat-token").value) headers.authorization = `Bearer ${$("chat-token").value}`;
  const url = `${apiUrl()}/v1/chat/completions`;
  let response;
  try {
    response = await fetch(url, { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Error(`${url} cannot be reached from this browser: ${error.message}`);
  }
  told.id = response.headers.get("x-request-id");
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error.message; } catch { /* It is shown as it is. */ }
    throw new Error(`${response.status}: ${message}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      if (event.usage) told.usage = event.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      if (choice.finish_reason) told.end = choice.finish_reason;
      if (choice.delta?.content || choice.delta?.reasoning_content) {
        told.last = performance.now();
        told.first ??= told.last;
        take(choice.delta);
      }
    }
  }
}

/** What an answer took, as this browser saw it, and the way to its request. */
function facts(item, told) {
  const parts = [];
  if (told.first !== null) parts.push(`first token after ${length((told.first - told.begun) * 1e3)}`);
  if (told.usage) {
    const drawn = told.usage.completion_tokens;
    if (drawn > 1 && told.last > told.first) parts.push(`${rateText(((drawn - 1) / (told.last - told.first)) * 1e3)} tokens/s`);
    parts.push(`${number(told.usage.prompt_tokens)} → ${plural(drawn, "token")}`);
  }
  if (told.end && told.end !== "stop") parts.push({ length: "ended at its limit of tokens" }[told.end] ?? words(told.end));
  say(item.facts, parts.join(" · "));
  if (told.id) {
    const link = el("a", { href: "#requests" }, "its request");
    link.addEventListener("click", () => openRequest(told.id));
    item.facts.append(parts.length ? " · " : "", link);
  }
}

// The conversation: what is typed, what is sent, and what comes back.

import { chat, getJson } from "./stream.js";
import { watch } from "./status.js";

const $ = (id) => document.getElementById(id);
const SUGGESTIONS = ["What is a KV cache?", "Tell me a short story.", "What is 7 + 5?"];
const KEY = "tpu-serve-api-key";

let messages = [];       // what the next request sends, the system message aside
let running = null;      // AbortController of the answer under way

// ---- drawing ----

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Fenced and inline code stand out; everything else is shown as it is, never as HTML.
function renderText(target, text) {
  target.replaceChildren();
  text.split(/^```/m).forEach((part, index) => {
    if (index % 2) {
      const pre = element("pre");
      pre.append(element("code", "", part.replace(/^[^\n]*\n?/, "")));
      target.append(pre);
      return;
    }
    if (index) part = part.replace(/^\n/, "");
    part.split(/(`[^`\n]+`)/).forEach((piece, place) =>
      target.append(place % 2 ? element("code", "", piece.slice(1, -1)) : document.createTextNode(piece)));
  });
}

function addMessage(role, text) {
  $("welcome").hidden = true;
  const block = element("article", `message ${role}`);
  block.append(element("div", "who", role === "user" ? "You" : role === "tool" ? "Tool" : "Model"));
  const body = element("div", "text");
  renderText(body, text);
  block.append(body);
  $("conversation").append(block);
  scrollDown();
  return block;
}

function scrollDown() {
  const box = $("conversation");
  box.scrollTop = box.scrollHeight;
}

function note(block, text, isWrong = false) {
  block.append(element("div", isWrong ? "note wrong" : "note", text));
}

// One answer on the page, which grows as chunks come.
class AnswerView {
  constructor() {
    this.block = addMessage("assistant", "");
    this.body = this.block.querySelector(".text");
    this.content = "";
    this.reasoning = "";
    this.calls = [];
  }

  add(delta) {
    const box = $("conversation");
    const wasAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
    const thought = delta.reasoning ?? delta.reasoning_content;
    if (thought) this.think(thought);
    if (delta.content) {
      this.content += delta.content;
      renderText(this.body, this.content);
    }
    for (const piece of delta.tool_calls ?? []) this.call(piece);
    if (wasAtEnd) scrollDown();
  }

  think(text) {
    if (!this.reasoning) this.thoughts = this.fold("Reasoning", "reasoning", this.body);
    this.reasoning += text;
    this.thoughts.textContent = this.reasoning;
  }

  call(piece) {
    const call = (this.calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = piece.id ?? call.id;
    call.function.name += piece.function?.name ?? "";
    call.function.arguments += piece.function?.arguments ?? "";
    call.view ??= this.fold("", "tool-call", null);
    call.view.parentElement.querySelector("summary").textContent = `Calls ${call.function.name}`;
    call.view.textContent = call.function.arguments;
  }

  fold(title, className, before) {
    const details = element("details", className);
    const text = element("pre");
    details.append(element("summary", "", title), text);
    this.block.insertBefore(details, before);
    return text;
  }

  // What a later request sends of this answer.
  message() {
    const made = { role: "assistant", content: this.content || null };
    if (this.calls.length) made.tool_calls = this.calls.map(({ view, ...call }) => call);
    return made;
  }
}

// ---- requests ----

function number(id) {
  return $(id).value.trim() === "" ? undefined : Number($(id).value);
}

function parseField(id, what) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what} is not valid JSON: ${error.message}`);
  }
}

function buildRequest() {
  const system = $("system").value.trim();
  const request = {
    model: $("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    max_completion_tokens: number("max_completion_tokens"),
    seed: number("seed"),
    tools: parseField("tools", "The list of tools"),
  };
  if (!$("send-defaults").checked) {
    for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) request[name] = number(name);
  }
  if (!$("enable_thinking").checked) request.chat_template_kwargs = { enable_thinking: false };
  const format = $("response_format").value;
  if (format === "json_object") request.response_format = { type: format };
  if (format === "json_schema") {
    request.response_format = { type: format, json_schema: { name: "answer", schema: parseField("schema", "The schema") ?? {} } };
  }
  return request;
}

async function answer() {
  const request = buildRequest();
  const view = new AnswerView();
  const sent = performance.now();
  let first = null, usage = null, reason = null;
  running = new AbortController();
  setRunning(true);
  try {
    for await (const chunk of chat(request, $("api-key").value, running.signal)) {
      const choice = chunk.choices[0];
      usage = chunk.usage ?? usage;
      if (choice) {
        if (first === null && usage?.completion_tokens > 0) {
          first = performance.now();
          $("first-token").textContent = `${Math.round(first - sent)} ms`;
        }
        view.add(choice.delta);
        reason = choice.finish_reason ?? reason;
      }
      showSpeed(usage, first);
    }
    if (reason === "length") note(view.block, "Cut off: no more tokens were allowed.");
  } catch (error) {
    if (error.name === "AbortError") note(view.block, "Stopped.");
    else note(view.block, error.message, true);
    if (error.status === 401) openSettings("api-key");
  } finally {
    running = null;
    setRunning(false);
  }
  if (view.content || view.calls.length) messages.push(view.message());
  else messages.pop(); // nothing came: the question can be asked again
  if (reason === "tool_calls") askForResults(view);
}

function showSpeed(usage, first) {
  if (!usage) return;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  $("usage").textContent = `${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""} + ${usage.completion_tokens}`;
  const seconds = (performance.now() - first) / 1000;
  if (first !== null && usage.completion_tokens > 1 && seconds > 0) {
    $("speed").textContent = ((usage.completion_tokens - 1) / seconds).toFixed(1);
  }
}

// The model has called functions; this page has none, so the person says what they returned.
function askForResults(view) {
  const form = element("form");
  const fields = view.calls.map((call) => {
    const label = element("label", "", `What ${call.function.name} returns`);
    const field = element("input");
    label.append(field);
    form.append(label);
    return field;
  });
  form.append(element("button", "", "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    form.remove();
    view.calls.forEach((call, index) => {
      messages.push({ role: "tool", tool_call_id: call.id, content: fields[index].value });
      addMessage("tool", fields[index].value);
    });
    answer();
  });
  view.block.append(form);
  fields[0]?.focus();
}

// ---- the page ----

function setRunning(isRunning) {
  $("send").hidden = isRunning;
  $("stop").hidden = !isRunning;
}

function openSettings(id) {
  $("settings").hidden = false;
  $("toggle-settings").setAttribute("aria-expanded", "true");
  $(id)?.focus();
}

async function send(text) {
  if (running || !text.trim()) return;
  $("prompt").value = "";
  messages.push({ role: "user", content: text });
  const block = addMessage("user", text);
  try {
    await answer();
  } catch (error) { // a setting that cannot be sent
    messages.pop();
    note(block, error.message, true);
    openSettings();
  }
}

async function loadModels() {
  try {
    const { data } = await getJson("v1/models", $("api-key").value);
    $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  } catch (error) {
    if (error.status === 401) openSettings("api-key");
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send($("prompt").value);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send($("prompt").value);
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", () => {
  running?.abort();
  messages = [];
  document.querySelectorAll(".message").forEach((one) => one.remove());
  $("welcome").hidden = false;
  $("prompt").focus();
});
$("toggle-settings").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("toggle-settings").setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("response_format").addEventListener("change", () => { $("schema-label").hidden = $("response_format").value !== "json_schema"; });
$("send-defaults").addEventListener("change", () => {
  for (const id of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) $(id).disabled = $("send-defaults").checked;
});
document.querySelectorAll("#settings output").forEach((output) => {
  const source = $(output.htmlFor.value);
  const update = () => { output.textContent = source.value; };
  source.addEventListener("input", update);
  update();
});
$("api-key").value = sessionStorage.getItem(KEY) ?? "";
$("api-key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, $("api-key").value);
  loadModels();
});
for (const text of SUGGESTIONS) {
  const button = element("button", "", text);
  button.type = "button";
  button.addEventListener("click", () => send(text));
  $("suggestions").append(button);
}
watch(() => $("api-key").value, loadModels);

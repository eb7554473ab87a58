// The line of live figures: health, and what /metrics says.

import { headers } from "./stream.js";

const INTERVAL = 2000;
const show = (id, text) => { document.getElementById(id).textContent = text; };

// Samples of Prometheus text as {name, labels, value}.
export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    samples.push({ name: match[1], labels, value: Number(match[3]) });
  }
  return samples;
}

async function showHealth() {
  const badge = document.getElementById("health");
  let text = "ready", kind = "ready";
  try {
    const response = await fetch("health");
    if (!response.ok) {
      const state = await response.json();
      text = state.status === "loading" ? `loading: ${state.phase} ${state.percent ?? 0} %` : (state.reason ?? state.status);
      kind = state.status === "loading" ? "" : "trouble";
    }
  } catch {
    [text, kind] = ["no connection", "trouble"];
  }
  badge.textContent = text;
  badge.className = `badge ${kind}`;
  return kind === "ready";
}

async function showMetrics(key) {
  const response = await fetch("metrics", { headers: headers(key) });
  if (!response.ok) return;
  const samples = parseMetrics(await response.text());
  // The same figures may be there under two prefixes.
  const find = (name) => samples.find((one) => one.name === `tpu_serve:${name}`) ?? samples.find((one) => one.name === `vllm:${name}`);
  show("running", find("num_requests_running")?.value ?? "–");
  show("waiting", find("num_requests_waiting")?.value ?? "–");
  const cache = find("kv_cache_usage_perc")?.value ?? 0;
  document.getElementById("cache").value = cache;
  show("cache-text", `${(100 * cache).toFixed(1)} %`);
  const plans = samples.filter((one) => one.name === "tpu_serve:moe_plans" && one.value > 0);
  show("experts", plans.map((one) => `${one.labels.path} (${one.labels.source})`).join(", ") || "none");
}

// Keeps the line up to date while the page is visible. `getKey` says which API key to send; `onReady` is called whenever the server becomes ready.
export function watch(getKey, onReady) {
  let wasReady = false;
  const tick = async () => {
    if (!document.hidden) {
      const isReady = await showHealth();
      if (isReady) await showMetrics(getKey()).catch(() => {});
      if (isReady && !wasReady) onReady();
      wasReady = isReady;
    }
    setTimeout(tick, INTERVAL);
  };
  tick();
}

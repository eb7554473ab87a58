// Requests to this server: JSON, and chat answers as they come.

export class ServerError extends Error {
  constructor(status, detail) {
    super(detail?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.param = detail?.param ?? null;
  }
}

export function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

export async function getJson(path, key) {
  const response = await fetch(path, { headers: headers(key) });
  if (!response.ok) throw await toError(response);
  return response.json();
}

async function toError(response) {
  let detail = null;
  try {
    detail = (await response.json()).error;
  } catch {
    // not JSON: the status has to do
  }
  return new ServerError(response.status, detail);
}

// The payloads of a stream of server-sent events, however the network cuts it. Ends at [DONE]; a stream that stops before it is an error.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // comments keep the connection alive
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Chunks of a chat answer. Raises ServerError for a refusal and for an error inside the stream.
export async function* chat(request, key, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  if (!response.ok) throw await toError(response);
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new ServerError(200, chunk.error);
    yield chunk;
  }
}

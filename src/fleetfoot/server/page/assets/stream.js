// Server-sent events of a fetch, which can have headers; an EventSource cannot.

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { key = "", body = null, signal = null } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = { headers, signal, cache: "no-store", credentials: "omit" };
  if (body !== null) {
    options.method = "POST";
    headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const response = await fetch(path, options);
  if (!response.ok) {
    let message = `${response.status} ${response.statusText}`;
    try {
      message = (await response.json()).error.message;
    } catch {
      // no JSON: the status says what there is to say
    }
    throw new HttpError(response.status, message);
  }
  return response;
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// The JSON of each event, until [DONE] or the end.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (left + value).split(/\r?\n\r?\n/);
      left = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

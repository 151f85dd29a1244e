// Requests to the server that this page came from, and its server-sent events.

const STORED = "eyas-api-key"; // until the tab is closed; never part of an address
const UNREACHABLE = "The server cannot be reached: is it still running?";

/** What went wrong, in the server's own sentence where it said one. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(STORED) ?? "",
  set: (value) => sessionStorage.setItem(STORED, value),
};

/** A response with a status of success; anything else is thrown as a Failure. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${bytes(key.get())}`;
  const reply = await reached(fetch(path, { ...options, headers }));
  if (!reply.ok) throw new Failure(await sentence(reply), reply.status);
  return reply;
}

/** The events of a streamed answer, as objects. Whatever ends it early is thrown. */
export async function* stream(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const reply = await call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reached(reader.read());
    if (done) throw new Failure("The connection ended before the answer did.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Failure(event.error.message);
      yield event;
    }
  }
}

/** As UTF-8 in a header, where each character stands for a byte. */
const bytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(UNREACHABLE);
  }
}

async function sentence(reply) {
  const text = await reached(reply.text());
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `The server answered with status ${reply.status} ${reply.statusText}.`; // a proxy's page, say
  }
}

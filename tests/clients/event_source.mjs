// Follows a run with the npm package "eventsource" until it stops by itself, and prints what it received.
import { EventSource } from "eventsource";

const [url, key] = process.argv.slice(2);
const TYPES = ["run.status", "message.delta", "message.completed"];
const answers = [];
const received = [];

// In Node.js the client can send a credential, which the EventSource of browsers cannot.
async function withKey(input, init) {
  const headers = { ...init.headers, Authorization: `Bearer ${key}` };
  const response = await fetch(input, { ...init, headers });
  answers.push({ after: init.headers["Last-Event-ID"] ?? null, status: response.status });
  return response;
}

const source = new EventSource(url, { fetch: withKey });
for (const type of TYPES) {
  source.addEventListener(type, (event) => received.push({ id: event.lastEventId, type, data: JSON.parse(event.data) }));
}
source.addEventListener("error", (event) => {
  if (source.readyState !== EventSource.CLOSED) return;
  console.log(JSON.stringify({ answers, received, code: event.code ?? null }));
});

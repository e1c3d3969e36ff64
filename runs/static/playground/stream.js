/** A complete client of a run's stream. It needs no other file, so you can copy it. */

export const FINAL = ["completed", "failed", "cancelled"];

/**
 * Calls `onEvent(index, type, data)` for each event. Reconnects until the run has ended or `signal` aborts.
 * Raises an Error with `status` if the service refuses the stream. `onConnection(is)` says whether there is one.
 */
export async function follow(url, headers, signal, onEvent, onConnection = () => {}) {
  let after = 0, ended = false, wait = 500;
  while (!ended && !signal.aborted) {
    try {
      const last = after ? { "Last-Event-ID": String(after) } : {};
      const answer = await fetch(url, { headers: { ...headers, Accept: "text/event-stream", ...last }, signal });
      if (answer.status === 204) return;
      if (!answer.ok) throw await refusal(answer);
      onConnection(true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "", event = { data: [] };
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const lines = (buffer + value).split("\n");
        buffer = lines.pop();
        for (const line of lines) {
          if (line !== "") { read(line, event); continue; }
          if (event.data.length) {
            const data = JSON.parse(event.data.join("\n"));
            after = event.id || after;
            onEvent(event.id, event.type, data);
            ended ||= event.type === "run.status" && FINAL.includes(data.status);
          }
          event = { data: [] };
        }
        wait = 500;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status && error.status !== 429 && error.status < 500) throw error;
      onConnection(false);
    }
    if (ended) return;
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = Math.min(wait * 2, 5000);
  }
}

function read(line, event) {
  const at = line.indexOf(":");
  const name = line.slice(0, at), text = line.slice(at + 1).replace(/^ /, "");
  if (name === "id") event.id = Number(text);
  else if (name === "event") event.type = text;
  else if (name === "data") event.data.push(text);
}

async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  return Object.assign(new Error(body?.error?.message || `The service answered ${answer.status}.`), { status: answer.status });
}

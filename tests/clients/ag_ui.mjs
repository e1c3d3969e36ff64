// Talks to an agent with the official AG-UI client, unmodified, and prints what the client has in the end: once as it
// is, and then once for each place where its connection breaks: after every second frame, every third …, or in the middle
// of each step. The client then runs again under the same runId.
import { HttpAgent } from "@ag-ui/client";

const { url, token, steps, tools = [], run = {}, every = "middle" } = JSON.parse(process.argv[2]);
const headers = { Authorization: `Bearer ${token}` };
const AT_ONCE = 8;
const broken = new Error("the connection broke");
// The client reports a broken connection, and cancels its stream once more without waiting for the outcome.
console.error = () => {};
process.on("unhandledRejection", (error) => {
  if (error !== broken) throw error;
});

// A fetch whose connection breaks after so many frames; counted tells how many there were.
function breaking(frames, counted) {
  return async (input, init) => {
    const response = await fetch(input, init);
    let seen = 0;
    const counting = new TransformStream({
      transform(bytes, controller) {
        // The server sends whole frames, perhaps several at once.
        for (const frame of new TextDecoder().decode(bytes).split(/(?<=\n\n)/)) {
          controller.enqueue(new TextEncoder().encode(frame));
          if (frame.includes("data:")) counted((seen += 1));
          if (seen === frames) return controller.error(broken);
        }
      },
    });
    return new Response(response.body.pipeThrough(counting), response);
  };
}

async function talk(cut) {
  const thread = crypto.randomUUID();
  const said = { thread, cut, types: [], outcomes: [], counts: [] };
  const agent = new HttpAgent({ url, threadId: thread, headers });
  agent.subscribe({
    onEvent: ({ event }) => void said.types.push(event.type),
    onRunFinishedEvent: (finished) => void said.outcomes.push(finished.outcome),
    onRunErrorEvent: ({ event }) => void said.outcomes.push(event.code),
  });
  for (const [index, step] of steps.entries()) {
    const input = { runId: `${thread}-${index}`, tools, forwardedProps: { run } };
    if (step.say) agent.addMessage({ id: crypto.randomUUID(), role: "user", content: step.say });
    if (step.resume) input.resume = agent.pendingInterrupts.map(({ id }) => ({ interruptId: id, ...step.resume }));
    if (step.result) {
      const calls = agent.messages.flatMap((message) => message.toolCalls ?? []);
      for (const { id } of calls.filter(({ id }) => !agent.messages.some(({ toolCallId }) => toolCallId === id))) {
        agent.addMessage({ id: crypto.randomUUID(), role: "tool", toolCallId: id, content: step.result });
      }
    }
    const ended = said.outcomes.length;
    agent.fetch = breaking(cut?.step === index ? cut.frames : Infinity, (count) => (said.counts[index] = count));
    while (said.outcomes.length === ended) {
      await agent.runAgent(input).catch(() => {});
      agent.fetch = fetch;
    }
  }
  said.messages = agent.messages;
  if (cut) return said;
  // A client that has nothing yet runs the last one again.
  const again = new HttpAgent({ url, threadId: thread, headers });
  await again.runAgent({ runId: `${thread}-${steps.length - 1}` });
  said.again = again.messages;
  return said;
}

const whole = await talk(null);
const places = whole.counts.map((count, step) =>
  Array.from({ length: count - 1 }, (_, frames) => ({ step, frames: frames + 1 })),
);
const cuts =
  every === "middle"
    ? places.map((frames) => frames[Math.floor(frames.length / 2)])
    : places.flat().filter((_, index) => every && index % every === 0);
const said = [whole];
while (cuts.length) said.push(...(await Promise.all(cuts.splice(0, AT_ONCE).map(talk))));
console.log(JSON.stringify(said));

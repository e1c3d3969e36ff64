// An app with CopilotKit's core, unmodified: it finds the agents, talks to one, and connects to the same thread anew.
globalThis.window = globalThis; // without a window, it does not look for the runtime
const { CopilotKitCore } = await import("@copilotkit/core");
const { z } = await import("zod");

const { url, token, thread, messages, filtered } = JSON.parse(process.argv[2]);
const said = { pending: [] };

async function open() {
  const core = new CopilotKitCore({
    runtimeUrl: url,
    headers: { Authorization: `Bearer ${token}` },
    ...(filtered ? { messageFilter: (all) => all.slice(-1) } : {}),
  });
  core.addTool({
    name: "pick",
    description: "Lets the user pick a colour.",
    parameters: z.object({ of: z.string() }),
    handler: async ({ of }) => `red of ${of}`,
  });
  while (core.runtimeConnectionStatus !== "connected") await new Promise((done) => setTimeout(done, 20));
  const agent = core.getAgent("default");
  agent.threadId = thread;
  await core.connectAgent({ agent });
  return { core, agent };
}

const { core, agent } = await open();
said.agents = Object.keys(core.agents);
for (const content of messages) {
  agent.addMessage({ id: crypto.randomUUID(), role: "user", content });
  await core.runAgent({ agent });
  while (agent.pendingInterrupts.length) {
    said.pending.push(...agent.pendingInterrupts.map(({ reason }) => reason));
    const resume = agent.pendingInterrupts.map(({ id }) => ({ interruptId: id, status: "resolved", payload: true }));
    await core.runAgent({ agent, resume });
  }
}
said.messages = agent.messages;
said.again = (await open()).agent.messages;
console.log(JSON.stringify(said));
process.exit(0);

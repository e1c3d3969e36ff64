// A conversation by an official MCP client for TypeScript. Prints the outcome and every error that the client reports.
const [name, mode, url, key] = process.argv.slice(2);

async function official() {
  if (name === "@modelcontextprotocol/client") return import(name);
  const { Client } = await import(`${name}/client/index.js`);
  const { StreamableHTTPClientTransport } = await import(`${name}/client/streamableHttp.js`);
  return { Client, StreamableHTTPClientTransport };
}

const { Client, StreamableHTTPClientTransport } = await official();
const errors = [];

async function converse() {
  // Clients before the revision 2026-07-28 ignore the mode.
  const client = new Client({ name: "test", version: "1.0.0" }, { versionNegotiation: { mode } });
  client.onerror = (error) => errors.push(String(error));
  const headers = { Authorization: `Bearer ${key}` };
  await client.connect(new StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } }));

  async function call(tool, input) {
    const result = await client.callTool({ name: tool, arguments: input });
    if (result.isError) throw new Error(result.content[0].text);
    return JSON.parse(result.content[0].text);
  }

  const tools = (await client.listTools()).tools.map((tool) => tool.name);
  if (mode === "legacy") await client.ping(); // the revision 2026-07-28 has no ping
  const chat = await call("create_chat", { title: "By MCP" });
  const run = await call("start_run", { chatId: chat.id, message: "/say Hello", waitSeconds: 30 });
  const listed = (await call("list_chats", {})).items.map((each) => each.id);
  const refused = await client.callTool({ name: "get_run", arguments: { runId: "run_1" } });
  const revision = client.getNegotiatedProtocolVersion?.() ?? null;
  await client.close();
  return {
    revision,
    tools,
    status: run.status,
    answer: run.answer,
    listed: listed.includes(chat.id),
    code: refused.isError ? JSON.parse(refused.content[0].text).error.code : null,
  };
}

console.log(JSON.stringify({ ...(await converse()), errors }));

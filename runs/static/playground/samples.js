/** Programs that do what was just done, in curl, Python and JavaScript. They run as they are shown. */

const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, item]) => `${python(name)}: ${python(item)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

const described = ({ fileName, contentType, sizeBytes }) => ({ fileName, contentType, sizeBytes });

/**
 * `done` is {api, chatId (null: a new chat), body, files, answers}. Without `token`, the program reads the variable TOKEN.
 */
export const SAMPLES = { curl, Python: pythonSample, JavaScript: javascript };

function curl({ api, chatId, body, files, answers }, token) {
  const given = token ? shell(token) : '"${TOKEN:?Set TOKEN to a session token or an API key}"';
  const lines = [
    `TOKEN=${given}`,
    `API=${shell(api)}`,
    'call() { curl -sS --fail-with-body -X "$1" "$API$2" -H "Authorization: Bearer $TOKEN" \\',
    '  -H "Content-Type: application/json" ${3:+-d "$3"}; }',
    "field() { python3 -c 'import json, sys",
    "value = json.load(sys.stdin)",
    'for name in sys.argv[1].split("."): value = (value or {}).get(name)',
    'print("" if value is None else value)\' "$1"; }',
    "",
    chatId ? `CHAT=${chatId}` : "CHAT=$(call POST /chats '{}' | field id)",
  ];
  files.forEach((file, at) => lines.push(
    `UPLOAD=$(call POST /attachments ${shell(JSON.stringify(described(file)))})`,
    `FILE${at + 1}=$(printf %s "$UPLOAD" | field id)`,
    `curl -sS --fail-with-body -X PUT "$(printf %s "$UPLOAD" | field upload.url)" \\`,
    `  -H ${shell(`Content-Type: ${file.contentType}`)} --data-binary ${shell(`@${file.fileName}`)}`,
    `call POST "/attachments/$FILE${at + 1}/complete" '{}' >/dev/null`,
  ));
  const ids = files.map((_, at) => `"'"$FILE${at + 1}"'"`).join(", ");
  const plain = shell(JSON.stringify(body));
  const whole = files.length ? `${plain.slice(0, -2)},"attachmentIds":[${ids}]}'` : plain;
  lines.push(
    `RUN=$(call POST "/chats/$CHAT/runs" ${whole} | field id)`,
    "",
    "# Until the run has ended or waits for an answer.",
    'pause() { while call GET "/runs/$RUN" | field status | grep -qE "queued|running"; do sleep 1; done; }',
    "pause",
  );
  for (const answer of answers) {
    lines.push(
      'WAITPOINT=$(call GET "/runs/$RUN" | field pendingWaitpoint.id)',
      `call POST "/waitpoints/$WAITPOINT/respond" ${shell(JSON.stringify(answer))} >/dev/null`,
      "pause",
    );
  }
  lines.push(
    'call GET "/runs/$RUN" | field answer',
    'printf "%s %s\\n" "$(call GET "/runs/$RUN" | field status)" "$(call GET "/runs/$RUN" | field errorMessage)"',
  );
  return lines.join("\n");
}

function pythonSample({ api, chatId, body, files, answers }, token) {
  const lines = [
    "import json, os, urllib.request",
    "",
    `API = ${python(api)}`,
    `TOKEN = ${token ? python(token) : 'os.environ["TOKEN"]  # a session token or an API key'}`,
    "",
    "",
    "def call(method, path, body=None):",
    "    data = None if body is None else json.dumps(body).encode()",
    '    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}',
    "    return urllib.request.urlopen(urllib.request.Request(API + path, data, headers, method=method))",
    "",
  ];
  if (files.length) {
    lines.push(
      "",
      "def attach(about):",
      '    """The id of a new attachment, from a file of the current folder."""',
      '    attachment = json.load(call("POST", "/attachments", about))',
      '    with open(about["fileName"], "rb") as file:',
      '        upload = attachment["upload"]',
      '        put = urllib.request.Request(upload["url"], file.read(), upload["headers"], method="PUT")',
      "        urllib.request.urlopen(put)",
      '    call("POST", f"/attachments/{attachment[\'id\']}/complete", {})',
      '    return attachment["id"]',
      "",
    );
  }
  const run = files.length
    ? `${python(body).slice(0, -1)}, "attachmentIds": [${files.map((file) => `attach(${python(described(file))})`).join(", ")}]}`
    : python(body);
  lines.push(
    "",
    chatId ? `chat = ${python(chatId)}` : 'chat = json.load(call("POST", "/chats", {}))["id"]',
    `run = json.load(call("POST", f"/chats/{chat}/runs", ${run}))["id"]`,
    `answers = iter(${python(answers)})`,
    'kind = ""',
    'for line in call("GET", f"/runs/{run}/stream"):',
    '    name, _, value = line.decode().rstrip("\\n").partition(": ")',
    '    if name == "event":',
    "        kind = value",
    '    elif name == "data":',
    "        data = json.loads(value)",
    '        if kind == "message.delta":',
    '            print(data["text"], end="", flush=True)',
    '        elif kind == "waitpoint.opened":',
    '            call("POST", f"/waitpoints/{data[\'id\']}/respond", next(answers))',
    'ended = json.load(call("GET", f"/runs/{run}"))',
    "print()",
    'print(ended["status"], ended["errorMessage"] or "")',
  );
  return lines.join("\n");
}

function javascript({ api, chatId, body, files, answers }, token) {
  const lines = [
    "// Node.js 18 or newer: node run.mjs",
    ...(files.length ? ['import { readFile } from "node:fs/promises";', ""] : []),
    `const API = ${JSON.stringify(api)};`,
    `const TOKEN = ${token ? JSON.stringify(token) : "process.env.TOKEN; // a session token or an API key"}`,
    "",
    "async function call(method, path, body) {",
    '  const headers = { Authorization: `Bearer ${TOKEN}`, "Content-Type": "application/json" };',
    "  const answer = await fetch(API + path, { method, headers, body: body && JSON.stringify(body) });",
    "  if (!answer.ok) throw new Error(await answer.text());",
    "  return answer;",
    "}",
    "",
  ];
  if (files.length) {
    lines.push(
      "/** The id of a new attachment, from a file of the current folder. */",
      "async function attach(about) {",
      '  const { id, upload } = await (await call("POST", "/attachments", about)).json();',
      "  const sent = await fetch(upload.url, { method: upload.method, headers: upload.headers, body: await readFile(about.fileName) });",
      "  if (!sent.ok) throw new Error(await sent.text());",
      '  await call("POST", `/attachments/${id}/complete`, {});',
      "  return id;",
      "}",
      "",
    );
  }
  const run = files.length
    ? `{ ...${JSON.stringify(body)}, attachmentIds: [${files.map((file) => `await attach(${JSON.stringify(described(file))})`).join(", ")}] }`
    : JSON.stringify(body);
  lines.push(
    chatId ? `const chat = ${JSON.stringify(chatId)};` : 'const chat = (await (await call("POST", "/chats", {})).json()).id;',
    `const run = (await (await call("POST", \`/chats/\${chat}/runs\`, ${run})).json()).id;`,
    `const answers = ${JSON.stringify(answers)};`,
    'const stream = await call("GET", `/runs/${run}/stream`);',
    'let rest = "";',
    "for await (const part of stream.body.pipeThrough(new TextDecoderStream())) {",
    '  const events = (rest + part).split("\\n\\n");',
    "  rest = events.pop();",
    "  for (const event of events) {",
    '    const [, kind, data] = event.match(/^event: (.*)\\ndata: (.*)$/m) || [];',
    '    if (kind === "message.delta") process.stdout.write(JSON.parse(data).text);',
    '    if (kind === "waitpoint.opened") await call("POST", `/waitpoints/${JSON.parse(data).id}/respond`, answers.shift());',
    "  }",
    "}",
    'const ended = await (await call("GET", `/runs/${run}`)).json();',
    'console.log("\\n" + ended.status, ended.errorMessage ?? "");',
  );
  return lines.join("\n");
}

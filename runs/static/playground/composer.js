/** The message box: text, attachments and the options of the next run. */

import { all, upload } from "./api.js";
import { clientTools } from "./client_tools.js";
import { $, announce, button, make } from "./dom.js";

const catalogue = { models: [], tools: [], agents: [] };
let files = []; // {node, attachment or null while it is uploaded}
let hooks = { send: async () => true, answer: async () => true };
let replaces = null; // the run whose message is edited
let mode = "send"; // "queue" while a run works, "answer" or "approve" while it waits

export const describe = (name) => catalogue.tools.find((tool) => tool.name === name);

const agent = () => catalogue.agents.find((one) => one.name === $("agent").value);

/** The model that the next run uses, as far as the page knows. */
export function model() {
  const named = $("model").value || agent()?.model;
  return catalogue.models.find((one) => (named ? one.name === named : one.isDefault));
}

export async function loadCatalogue() {
  const read = (path) => all(path).catch(() => []); // a key may lack the scope; the service may have no agents
  [catalogue.models, catalogue.tools, catalogue.agents] = await Promise.all(["/models", "/tools", "/agents"].map(read));
  fill($("agent"), "No agent", catalogue.agents);
  // The admin links to an agent as #agent=NAME.
  const wanted = new URLSearchParams(location.hash.slice(1)).get("agent");
  if (catalogue.agents.some(({ name }) => name === wanted)) $("agent").value = wanted;
  $("agent-label").hidden = !catalogue.agents.length;
  agentChosen();
}

/** An agent has a model and tools of its own. A run may use less of its tools, and no others. */
function agentChosen() {
  const { model: own, tools, version } = agent() || {};
  const versions = Array.from({ length: Math.max(0, version - 1 || 0) }, (_, at) => version - 1 - at);
  $("version").replaceChildren(new Option(`Current: ${version}`, ""), ...versions.map((one) => new Option(one, one)));
  $("version-label").hidden = !versions.length;
  const standard = catalogue.models.find((one) => (own ? one.name === own : one.isDefault));
  fill($("model"), standard ? `${own ? "Agent’s model" : "Default"}: ${standard.displayName}` : "Default model", catalogue.models);
  const off = boxes().filter((box) => !box.checked).map((box) => box.value);
  const offered = catalogue.tools.filter((tool) => !tools || tools.includes(tool.name));
  for (const label of $("tools").querySelectorAll("label")) label.remove(); // Chromium hides a fieldset whose legend changes
  $("tools").append(...offered.map((tool) => toolChoice(tool, !off.includes(tool.name))));
  markOptions();
}

const boxes = () => [...$("tools").querySelectorAll("input")];

function fill(select, first, items) {
  const chosen = select.value;
  select.replaceChildren(new Option(first, ""), ...items.map((one) => new Option(one.displayName || one.name, one.name)));
  select.value = items.some((one) => one.name === chosen) ? chosen : "";
}

function toolChoice(tool, chosen) {
  const box = make("input");
  box.type = "checkbox";
  box.checked = chosen;
  box.value = tool.name;
  const label = make("label", "", box, `${tool.displayName} · ${tool.price}`);
  label.title = tool.description;
  return label;
}

/** What the options add to the body of a run; null, and the mistake is shown, if one of them is not valid. */
export function options() {
  for (const [id, read] of Object.entries(READERS)) {
    try {
      read($(id).value);
      $(id).setCustomValidity("");
    } catch (error) {
      $(id).setCustomValidity(error.message);
    }
  }
  const wrong = $("options").querySelector(":is(input, textarea):invalid");
  if (wrong) {
    // A browser shows no message in a part of the page that is closed.
    $("options").open = true;
    wrong.reportValidity();
  }
  return wrong ? null : chosenOptions();
}

/** How what is typed into a field becomes the value of the request. */
const READERS = {
  schema(text) {
    let value = null;
    try {
      value = JSON.parse(text || "{}");
    } catch { /* the message below says it */ }
    if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error("Write a JSON Schema: {\"type\": \"object\", …}");
    return value;
  },
  metadata(text) {
    return Object.fromEntries(text.split("\n").filter((line) => line.trim()).map((line) => {
      const [name, ...value] = line.split("=");
      if (!value.length) throw new Error("Write one pair a line: name=value");
      return [name.trim(), value.join("=").trim()];
    }));
  },
};

/** Only valid after `options()` has looked. */
function chosenOptions() {
  const body = {};
  if ($("agent").value) body.agent = $("agent").value + ($("version").value && `@${$("version").value}`);
  if ($("model").value) body.model = $("model").value;
  const chosen = boxes().filter((box) => box.checked);
  // The catalogue shows the tools of the current version only.
  if (!$("version").value && chosen.length < boxes().length) body.tools = chosen.map((box) => box.value);
  if ($("instructions").value.trim()) body.instructions = $("instructions").value;
  if ($("schema").value.trim()) body.outputSchema = READERS.schema($("schema").value);
  if ($("metadata").value.trim()) body.metadata = READERS.metadata($("metadata").value);
  if ($("budget").value !== "") body.maxCredits = Number($("budget").value);
  if ($("threshold").value !== "") body.creditApprovalThreshold = Number($("threshold").value);
  return body;
}

function markOptions() {
  const fields = ["version", "instructions", "schema", "metadata", "budget", "threshold"].filter((id) => $(id).value.trim());
  const fewer = !$("version").value && boxes().some((box) => !box.checked);
  const count = fields.length + Number(fewer);
  $("tools").hidden = !boxes().length || Boolean($("version").value);
  $("options").querySelector("summary").textContent = count ? `Options (${count})` : "Options";
}

// --- attachments ------------------------------------------------------------------------------------------------

function add(name, uploaded) {
  const remove = button("×", "", () => { files = files.filter((one) => one !== entry); entry.node.remove(); showFiles(); });
  remove.setAttribute("aria-label", `Remove ${name}`);
  tell("");
  const entry = { node: make("li", "", name, remove), attachment: null };
  files.push(entry);
  $("files").append(entry.node);
  showFiles();
  entry.done = uploaded.then(
    (attachment) => { entry.attachment = attachment; announce(`${name} is attached`); },
    (error) => { entry.node.classList.add("broken"); remove.before(` ${error.message} `); announce(`${name}: ${error.message}`); },
  );
}

function showFiles() {
  $("files").hidden = !files.length;
}

const attach = (list) => { for (const file of list) add(file.name, upload(file)); };

function dropZone(form) {
  const over = (event) => { event.preventDefault(); form.classList.add("drop"); };
  // Anywhere on the chat, because a miss would make the browser open the file.
  const zone = $("talk");
  zone.addEventListener("dragover", over);
  zone.addEventListener("dragleave", () => form.classList.remove("drop"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("drop");
    if (!$("composer").hidden) attach(event.dataTransfer.files);
  });
  $("message").addEventListener("paste", (event) => { if (event.clipboardData.files.length) attach(event.clipboardData.files); });
}

// --- sending ----------------------------------------------------------------------------------------------------

function grow() {
  const box = $("message");
  box.rows = Math.min(8, box.value.split("\n").length);
}

/** Puts a message into the box, with attachments that are uploaded already; it may be that of a run, to be replaced. */
export function edit(message, attachments, runId = null) {
  clear();
  replaces = runId;
  $("editing").hidden = !replaces;
  $("message").value = message;
  for (const attachment of attachments) add(attachment.fileName, Promise.resolve(attachment));
  grow();
  $("message").focus();
}

/** Leaves an edited message as it was. */
export function stopEditing() {
  if (replaces) clear();
}

export function clear() {
  replaces = null;
  $("editing").hidden = true;
  $("message").value = "";
  files = [];
  $("files").replaceChildren();
  showFiles();
  grow();
}

const MODES = {
  send: ["Send", "Write a message"],
  queue: ["Queue", "Write the next message; it runs after this one"],
  answer: ["Answer", "Write your answer"],
  approve: ["Send", "The run waits for your decision above"],
};

/** What the message box does now; returns what it did before. */
export function setMode(name) {
  const before = mode;
  if (name === before) return before;
  mode = name;
  const [label, placeholder] = MODES[name];
  $("send").textContent = label;
  $("message").placeholder = placeholder;
  $("stop").hidden = name === "send";
  tell("");
  return before;
}

/** Why nothing was sent. */
function tell(text) {
  $("composer-note").textContent = text;
  $("composer-note").hidden = !text;
}

async function submit() {
  const message = $("message").value;
  tell("");
  if (!message.trim()) return;
  const edited = replaces;
  if (mode === "approve" && !edited) {
    tell("The run waits for your decision. Approve or refuse it above, or stop the run.");
    return;
  }
  if (mode === "answer" && !edited) {
    if (files.length) tell("An answer can't have files. Remove them first.");
    else if (await hooks.answer(message)) clear();
    return;
  }
  const body = options();
  if (!body) return;
  await Promise.all(files.map((one) => one.done));
  const attachments = files.map((one) => one.attachment);
  if (attachments.includes(null)) {
    tell("A file was not accepted. Remove it, then send the message.");
    return;
  }
  clear();
  const sent = await hooks.send({ message, ...body, ...clientTools(message), ...(edited ? { replaces: edited } : {}) }, attachments);
  if (!sent) edit(message, attachments, edited);
}

/** `send(body, attachments)` resolves to whether the run was started, `answer(text)` to whether it was accepted. */
export function start(given) {
  hooks = given;
  const form = $("composer").querySelector("form");
  form.noValidate = true; // options() does that, for every way to send
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("stop-editing").addEventListener("click", stopEditing);
  $("message").addEventListener("input", grow);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { attach($("file").files); $("file").value = ""; });
  $("stop").addEventListener("click", async () => {
    $("stop").disabled = true;
    await hooks.stop();
    $("stop").disabled = false;
  });
  $("agent").addEventListener("change", agentChosen);
  $("version").addEventListener("change", markOptions);
  $("options").addEventListener("change", markOptions);
  // Before the click, which may open them.
  document.addEventListener("pointerdown", ({ target }) => { if (!$("options").contains(target)) $("options").open = false; });
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape") $("options").open = false; });
  dropZone(form);
}

/** The options as they are, for an example that is sent by a click. */
export function sendExample(message) {
  const body = options();
  if (body) hooks.send({ message, ...body, ...clientTools(message) }, []);
}

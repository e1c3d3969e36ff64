/** The message box: text, attachments and the options of the next run. */

import { all, upload } from "./api.js";
import { $, announce, button, make } from "./dom.js";

const catalogue = { models: [], tools: [], agents: [] };
let files = []; // {node, attachment or null while it is uploaded}
let sender = async () => true;
let busy = false;

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
  $("agent-label").hidden = !catalogue.agents.length;
  agentChosen();
}

/** An agent has a model and tools of its own. A run may use less of its tools, and no others. */
function agentChosen() {
  const { model: own, tools } = agent() || {};
  const standard = catalogue.models.find((one) => (own ? one.name === own : one.isDefault));
  fill($("model"), standard ? `${own ? "Agent’s model" : "Default"}: ${standard.displayName}` : "Default model", catalogue.models);
  const off = boxes().filter((box) => !box.checked).map((box) => box.value);
  const offered = catalogue.tools.filter((tool) => !tools || tools.includes(tool.name));
  for (const label of $("tools").querySelectorAll("label")) label.remove(); // Chromium hides a fieldset whose legend changes
  $("tools").append(...offered.map((tool) => toolChoice(tool, !off.includes(tool.name))));
  $("tools").hidden = !offered.length;
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
  const wrong = $("options").querySelector("input:invalid");
  if (wrong) {
    // A browser shows no message in a part of the page that is closed.
    $("options").open = true;
    wrong.reportValidity();
  }
  return wrong ? null : chosenOptions();
}

function chosenOptions() {
  const body = {};
  if ($("agent").value) body.agent = $("agent").value;
  if ($("model").value) body.model = $("model").value;
  const chosen = boxes().filter((box) => box.checked);
  if (chosen.length < boxes().length) body.tools = chosen.map((box) => box.value);
  if ($("budget").value !== "") body.maxCredits = Number($("budget").value);
  if ($("threshold").value !== "") body.creditApprovalThreshold = Number($("threshold").value);
  return body;
}

function markOptions() {
  const { agent, model: named, ...hidden } = chosenOptions();
  const count = Object.keys(hidden).length;
  $("options").querySelector("summary").textContent = count ? `Options (${count})` : "Options";
}

// --- attachments ------------------------------------------------------------------------------------------------

function add(name, uploaded) {
  const remove = button("×", "", () => { files = files.filter((one) => one !== entry); entry.node.remove(); showFiles(); });
  remove.setAttribute("aria-label", `Remove ${name}`);
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

/** Puts a message into the box, with attachments that are uploaded already. */
export function edit(message, attachments) {
  clear();
  $("message").value = message;
  for (const attachment of attachments) add(attachment.fileName, Promise.resolve(attachment));
  grow();
  $("message").focus();
}

export function clear() {
  $("message").value = "";
  files = [];
  $("files").replaceChildren();
  showFiles();
  grow();
}

export function setBusy(is) {
  busy = is;
  $("send").hidden = is;
  $("stop").hidden = !is;
  $("stop").disabled = false;
}

async function submit() {
  const message = $("message").value, body = options();
  if (busy || !message.trim() || !body) return;
  await Promise.all(files.map((one) => one.done));
  const attachments = files.map((one) => one.attachment);
  if (attachments.includes(null)) return; // the person removes what failed, or tries again
  const text = message;
  clear();
  if (!(await sender({ message: text, ...body }, attachments))) edit(text, attachments);
}

/** `send(body, attachments)` resolves to whether the run was started. */
export function start(send, stopRun) {
  sender = send;
  const form = $("composer").querySelector("form");
  form.noValidate = true; // options() does that, for every way to send
  form.addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  $("message").addEventListener("input", grow);
  $("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { attach($("file").files); $("file").value = ""; });
  $("stop").addEventListener("click", () => { $("stop").disabled = true; stopRun(); });
  $("agent").addEventListener("change", agentChosen);
  $("options").addEventListener("change", markOptions);
  // Before the click, which may open them.
  document.addEventListener("pointerdown", ({ target }) => { if (!$("options").contains(target)) $("options").open = false; });
  document.addEventListener("keydown", ({ key }) => { if (key === "Escape") $("options").open = false; });
  dropZone(form);
}

/** The options as they are, for an example that is sent by a click. */
export function sendExample(message) {
  const body = options();
  if (body) sender({ message, ...body }, []);
}

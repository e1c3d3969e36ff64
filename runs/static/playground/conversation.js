/** The open chat: its messages and runs, and what can be done with them. */

import { call } from "./api.js";
import { $, atEnd, button, copy, make, notice, toEnd } from "./dom.js";
import { RunView } from "./run.js";
import { optionsOf, remember } from "./sent.js";
import { FINAL } from "./stream.js";

const PAGE = 20;
const AT_ONCE = 3;

const empty = () => ({
  chatId: null, runs: new Map(), live: [], starting: false, controller: new AbortController(), cursors: null, answers: new Map(),
});

/**
 * The open chat. `runs` are views by id, in the order of the page, `live` those of them that have not ended; `answers`
 * the contents of their messages.
 */
export const open = empty();
const hooks = { describe: () => null, options: () => null, changed: () => {}, selected: () => {}, started: () => {}, edit: () => {}, mode: () => {}, failed: () => {} };

export function configure(given) {
  Object.assign(hooks, given);
}

export function close() {
  open.controller.abort();
  Object.assign(open, empty());
  $("messages").replaceChildren();
  $("earlier").hidden = true;
  showMode();
  hooks.selected(null);
}

const question = () => open.live.map((view) => view.question).find(Boolean);

/** What the message box is for, by what the chat's runs do. */
function showMode() {
  const asked = question();
  if (asked) hooks.mode(asked.answer ? "answer" : "approve");
  else hooks.mode(open.live.length || open.starting ? "queue" : "send");
}

/** Answers the open question. Resolves to whether the answer was accepted. */
export const answer = async (text) => Boolean(await question()?.answer?.(text));

/** Shows the newest messages of a chat and continues its run, if one is active. */
export async function show(chatId) {
  close();
  open.chatId = chatId;
  await earlier();
  toEnd();
}

/** Adds one page of older messages above the others. */
export async function earlier() {
  const { chatId, controller, cursors } = open;
  const more = (name, limit, order = "") =>
    cursors && !cursors[name]
      ? { items: [], nextCursor: null }
      : call("GET", `/chats/${chatId}/${name}?limit=${limit}${order}${cursors ? `&cursor=${encodeURIComponent(cursors[name])}` : ""}`);
  const [messages, runs] = await Promise.all([more("messages", 2 * PAGE, "&order=desc"), more("runs", PAGE)]);
  if (controller.signal.aborted) return;
  open.cursors = { messages: messages.nextCursor, runs: runs.nextCursor };
  $("earlier").hidden = !messages.nextCursor;
  const box = $("messages"), first = box.firstChild, summaries = new Map(runs.items.map((run) => [run.id, run]));
  // An answer may be on a newer page than its question.
  for (const { role, runId, content } of messages.items) {
    if (role === "assistant") open.answers.set(runId, content);
  }
  const asked = messages.items.reverse().filter((message) => message.role === "user" && !open.runs.has(message.runId));
  const views = asked.map((message) => {
    const view = viewOf(message.runId, message);
    box.insertBefore(view.said, first);
    box.insertBefore(view.node, first);
    return view;
  });
  open.runs = new Map([...views.map((view) => [view.id, view]), ...open.runs]);
  await restore(views, summaries);
}

async function restore(views, summaries) {
  const { signal } = open.controller;
  const played = [];
  for (const view of views) {
    const summary = summaries.get(view.id) || (await call("GET", `/runs/${view.id}`));
    if (signal.aborted) return;
    const { requestedModel, agent } = summary;
    const shown = { ...(agent ? { agent } : {}), ...(requestedModel ? { model: requestedModel } : {}) };
    const sent = optionsOf(view.id);
    Object.assign(view.request, { body: { ...view.request.body, ...(sent || shown) }, complete: Boolean(sent) });
    view.fill(summary, open.answers.get(view.id));
    finishActions(view);
    if (!FINAL.includes(summary.status)) watch(view);
    // A list has neither the calls nor the output, which may be all of an answer.
    else if ((summary.toolInvocationCount ?? summary.toolInvocations.length) || (summary.status === "completed" && !open.answers.get(view.id))) {
      played.push(view);
    }
  }
  const last = views.at(-1);
  if (last) select(last);
  // Newest first, because people read the end of a chat first.
  const next = async () => {
    for (let view = played.pop(); view && !signal.aborted; view = played.pop()) {
      await view.play(signal).catch(() => {});
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, next));
}

function viewOf(runId, message) {
  const view = new RunView(runId, { describe: hooks.describe, changed: (run) => { showMode(); hooks.changed(run); } });
  const { content, attachments = [] } = message;
  view.request = { chatId: open.chatId, body: { message: content }, files: attachments, complete: false };
  const text = make("div", content.startsWith("/") ? "user script" : "user", content);
  view.said = make("article", "said", text);
  view.said.setAttribute("aria-label", "Your message");
  if (attachments.length) view.said.append(make("ul", "attached", ...attachments.map((file) => make("li", "", file.fileName))));
  const copyButton = button("Copy", "quiet", () => copy(content, copyButton));
  view.said.append(make("div", "actions", copyButton, button("Edit", "quiet", () => hooks.edit(content, attachments, runId))));
  return view;
}

function finishActions(view) {
  const copyButton = button("Copy", "quiet", () => copy(view.text, copyButton));
  view.actions.replaceChildren(
    copyButton,
    button(view.request.complete ? "Regenerate" : "Regenerate with the current options", "quiet", () => regenerate(view)),
    button("Details", "quiet", () => select(view, true)),
  );
}

async function select(view, asked = false) {
  hooks.selected(view, asked);
  // A finished answer without tools was shown without its events.
  if (asked && !view.events.length && FINAL.includes(view.status)) {
    await view.play(open.controller.signal).catch((error) => notice(error.message));
  }
}

async function regenerate(view) {
  const { complete, body, files } = view.request;
  const options = complete ? {} : hooks.options();
  if (options) await send({ ...(complete ? body : { message: body.message, ...options }), replaces: view.id }, files);
}

/** Takes a run and all after it off the page, because another one has replaced them. */
function takeOff(runId) {
  const ids = [...open.runs.keys()];
  for (const id of ids.slice(ids.indexOf(runId))) {
    const view = open.runs.get(id);
    view.said.remove();
    view.node.remove();
    open.runs.delete(id);
    open.live = open.live.filter((one) => one !== view);
  }
}

/**
 * Starts a run, in a new chat if none is open. If a run works, the new one is queued behind it, or cancels it if it
 * replaces an earlier one. Resolves when the run has started; false if it was refused.
 */
export async function send(body, files) {
  if (open.starting) return false;
  const { controller } = open;
  const isNew = !open.chatId;
  open.starting = true;
  showMode();
  try {
    if (isNew) open.chatId = (await call("POST", "/chats", {})).id;
    const ids = files.length ? { attachmentIds: files.map((file) => file.id) } : {};
    const { attachmentIds, replaces, ...kept } = body;
    const replacing = replaces ? { replaces } : {};
    const behind = open.live.length ? { onActiveRun: replaces ? "cancel" : "enqueue" } : {};
    const run = await call("POST", `/chats/${open.chatId}/runs`, { ...kept, ...ids, ...replacing, ...behind });
    if (controller.signal.aborted) return true;
    if (replaces) takeOff(replaces);
    open.starting = false;
    const view = viewOf(run.id, { content: body.message, attachments: files });
    view.request = { chatId: isNew ? null : open.chatId, body: kept, files, complete: true };
    remember(run.id, kept);
    open.runs.set(run.id, view);
    $("messages").append(view.said, view.node);
    toEnd();
    hooks.started(open.chatId, isNew);
    watch(view);
    return true;
  } catch (error) {
    if (controller.signal.aborted) return true;
    open.starting = false;
    showMode();
    notice(error.message);
    if (error.status === 401) hooks.failed();
    return false;
  }
}

/** Follows a run that has not ended. */
async function watch(view) {
  const { signal } = open.controller;
  open.live.push(view);
  showMode();
  if (open.live[0] === view) hooks.selected(view);
  try {
    await view.play(signal, { live: true });
  } catch (error) {
    if (!signal.aborted) notice(error.message);
    if (error.status === 401) hooks.failed();
  }
  if (signal.aborted) return;
  open.live = open.live.filter((one) => one !== view);
  if (open.live.length) hooks.selected(open.live[0]);
  atEnd(() => finishActions(view));
  showMode();
  hooks.changed(view);
}

/** Cancels the run that works; those behind it follow. */
export async function stop() {
  const [view] = open.live;
  if (view) await call("POST", `/runs/${view.id}/cancel`, {}).catch((error) => notice(error.message));
}

/** The panel beside the chat: tabs for the timeline, the code, the credits, the events of the chosen run, and webhooks. */

import { session, surface } from "./api.js";
import * as credits from "./credits.js";
import { $, button, copy, make } from "./dom.js";
import { SAMPLES } from "./samples.js";
import * as timeline from "./timeline.js";
import * as webhooks from "./webhooks.js";

const TABS = ["timeline", "code", "credits", "events", "webhooks"];
const LINES = 200;
let shown = "timeline";
let view = null;
let language = "curl";
let withToken = false;
let drawing = null;

/** `chosen` is a run's view or null. */
export function select(chosen) {
  view = chosen;
  draw();
}

/** Draws again soon; a stream changes a run many times a second. */
export function changed(run) {
  if (run === view) drawing ??= setTimeout(draw, 200);
}

export function openTab(name, focus = false) {
  shown = name;
  for (const tab of TABS) {
    const node = $(`tab-${tab}`), is = tab === name;
    node.setAttribute("aria-selected", String(is));
    node.tabIndex = is ? 0 : -1;
    $(`show-${tab}`).hidden = !is;
    if (is && focus) node.focus();
  }
  draw();
}

function draw() {
  clearTimeout(drawing);
  drawing = null;
  const panel = $(`show-${shown}`);
  if (shown === "timeline") timeline.show(panel, view);
  else if (shown === "code") showCode(panel);
  else if (shown === "events") showEvents();
  else if (session.credential) (shown === "credits" ? credits : webhooks).show(panel).catch((error) => panel.replaceChildren(make("p", "notice", error.message)));
}

function showCode(panel) {
  if (!view) {
    panel.replaceChildren(make("p", "hint", "The code of what you do appears here, in curl, Python and JavaScript."));
    return;
  }
  const had = panel.contains(document.activeElement) ? document.activeElement.dataset.name : null;
  const { chatId, body, files, complete } = view.request;
  const done = { api: location.origin + surface(), chatId, body, files, answers: view.answers() };
  const text = SAMPLES[language](done, withToken ? session.credential : null);
  const languages = Object.keys(SAMPLES).map((name) => {
    const choice = button(name, "quiet", () => { language = name; showCode(panel); });
    choice.setAttribute("aria-pressed", String(name === language));
    choice.dataset.name = name;
    return choice;
  });
  const box = make("input");
  box.type = "checkbox";
  box.checked = withToken;
  box.dataset.name = "token";
  box.addEventListener("change", () => { withToken = box.checked; showCode(panel); });
  const sample = make("pre", "", text);
  sample.id = "sample";
  sample.tabIndex = 0;
  sample.setAttribute("aria-label", `What was just done, in ${language}`);
  const copyButton = button("Copy", "quiet", () => copy(text, copyButton));
  panel.replaceChildren(
    make("div", "pick", ...languages, copyButton),
    make("div", "pick", make("label", "", box, "with my token")),
    ...(complete ? [] : [make("p", "hint", "This tab did not start the run: its tools, budget and threshold are missing here.")]),
    sample,
  );
  if (had) panel.querySelector(`[data-name="${had}"]`)?.focus();
}

function showEvents() {
  const log = $("log"), panel = $("show-events");
  const stick = panel.scrollHeight - panel.scrollTop - panel.clientHeight < 60;
  const lines = (view?.events || []).slice(-LINES).map(({ index, type, data }) =>
    make("li", "", make("i", "", index), make("div", "", make("b", "", type), " ", JSON.stringify(data).slice(0, 600))));
  log.replaceChildren(...lines);
  if (stick) panel.scrollTop = panel.scrollHeight;
}

export function start() {
  TABS.forEach((tab, at) => {
    $(`tab-${tab}`).addEventListener("click", () => openTab(tab));
    $(`tab-${tab}`).addEventListener("keydown", ({ key }) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
      if (step) openTab(TABS[(at + step + TABS.length) % TABS.length], true);
    });
  });
  openTab(shown);
}

/** Markdown of models, as elements. The text is untrusted: raw HTML is shown as text, pictures become links. */

import { button, copy } from "./dom.js";
import DOMPurify from "./vendor/purify.es.mjs";

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  // A class names the language of code; it does not stay.
  ALLOWED_ATTR: ["align", "class", "href", "title", "start"],
  // Otherwise DOMPurify takes every value for an address.
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|\/(?!\/))/i,
  RETURN_DOM_FRAGMENT: true,
};

// A longer text is shown as it is, and so is a text that takes longer to read. Some texts of 20,000 characters take minutes.
const MARKDOWN_MAX = 100_000;
const DEADLINE = 1_000;
const START_DEADLINE = 10_000;

let reader = null; // a promise of the worker, or of null if it can't be loaded
let last = Promise.resolve();

function startReader() {
  const worker = new Worker(new URL("./markdown_worker.js", import.meta.url), { type: "module" });
  return answerOf(worker, START_DEADLINE).then((answer) => (answer === null ? null : worker));
}

/** The next message of the worker; null, and the end of the worker, if there is none in time. */
function answerOf(worker, milliseconds) {
  return new Promise((resolve) => {
    const stop = () => { worker.terminate(); reader = null; resolve(null); };
    const late = setTimeout(stop, milliseconds);
    worker.onerror = () => { clearTimeout(late); stop(); };
    worker.onmessage = ({ data }) => { clearTimeout(late); resolve(data); };
  });
}

async function read(text) {
  const worker = await (reader ??= startReader());
  if (!worker) return null;
  worker.postMessage(text);
  return answerOf(worker, DEADLINE);
}

/** A promise of the text as elements. Texts are read one after another, in order. */
export async function render(text) {
  if (text.length > MARKDOWN_MAX) return plain(text);
  last = last.then(() => read(text));
  const html = await last;
  return html === null ? plain(text) : elements(html);
}

function elements(html) {
  const fragment = DOMPurify.sanitize(html, ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const classed of fragment.querySelectorAll("[class]")) {
    const language = classed.className.match(/^language-([\w+#.-]{1,30})$/)?.[1];
    if (language && classed.parentNode.tagName === "PRE") classed.parentNode.dataset.language = language;
    classed.removeAttribute("class");
  }
  for (const wide of fragment.querySelectorAll("pre, table")) {
    const box = document.createElement("div");
    box.className = "wide";
    box.tabIndex = 0; // so that the keyboard can scroll it
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", wide.tagName === "PRE" ? "Code" : "Table");
    wide.replaceWith(box);
    box.append(wide);
    if (wide.tagName === "PRE") box.before(headOf(wide));
  }
  return fragment;
}

/** The language of code, and a button that copies the code. */
function headOf(code) {
  const head = document.createElement("div");
  const copyButton = button("Copy", "quiet", () => copy(code.textContent, copyButton));
  copyButton.setAttribute("aria-label", "Copy the code");
  head.className = "code-head";
  head.append(code.dataset.language || "", copyButton);
  return head;
}

function plain(text) {
  const node = document.createElement("div");
  node.className = "plain";
  node.textContent = text;
  return node;
}

/** Renders growing text into an element, less often the longer it takes, so that long answers do not block the page. */
export class Growing {
  constructor(node, changed) {
    Object.assign(this, { node, changed, text: "", due: null, took: 0 });
  }

  add(text) {
    this.text += text;
    this.due ??= setTimeout(() => this.show(), Math.max(40, this.took * 5));
  }

  async show() {
    clearTimeout(this.due);
    const { text } = this, began = performance.now();
    this.node.replaceChildren(await render(text));
    this.took = performance.now() - began;
    this.due = null;
    if (text !== this.text) this.add("");
    this.changed();
  }
}

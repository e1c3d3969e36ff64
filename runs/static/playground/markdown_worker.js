/** Reads Markdown as HTML, apart from the page, which stays usable meanwhile and stops this worker if it takes too long. */

import { Marked } from "./vendor/marked.esm.js";

const escape = (text) => text.replace(/[&<>"']/g, (found) => `&#${found.codePointAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    // A picture of another host would tell that host what the chat says.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// More elements would block the page when it shows them. A short table can have millions of cells.
const ELEMENTS_MAX = 5_000;

/** The HTML, not sanitised; null for a text that is better shown as it is. */
function read(text) {
  try {
    const html = marked.parse(text);
    return html.split("<").length <= 2 * ELEMENTS_MAX ? html : null;
  } catch { // nested too deeply
    return null;
  }
}

self.addEventListener("message", ({ data }) => self.postMessage(read(data)));
self.postMessage("ready");

/** The list of chats, newest first. */

import { call } from "./api.js";
import { $, ago, make } from "./dom.js";

let cursor = null;
let current = null;
let choose = () => {};

function row(chat) {
  const link = make("a", "", chat.title || "New chat", make("span", "", ago(chat.updatedAt)));
  link.href = `/playground/${chat.id}`;
  link.dataset.chat = chat.id;
  link.title = chat.title || "";
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return; // opens another tab
    event.preventDefault();
    choose(chat.id);
  });
  return make("li", "", link);
}

export async function load(older = false) {
  const at = older && cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
  const page = await call("GET", `/chats?limit=30${at}`);
  cursor = page.nextCursor;
  const rows = page.items.map(row);
  if (older) $("chat-list").append(...rows);
  else $("chat-list").replaceChildren(...rows);
  $("more-chats").hidden = !cursor;
  mark(current);
}

export function mark(chatId) {
  current = chatId;
  for (const link of $("chat-list").querySelectorAll("a")) {
    if (link.dataset.chat === chatId) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

export function start(chosen) {
  choose = chosen;
  $("more-chats").addEventListener("click", () => load(true));
}

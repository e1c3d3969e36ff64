/** The list of chats, newest first: open, search, rename, delete. */

import { call } from "./api.js";
import { $, ago, announce, button, make, notice } from "./dom.js";

const SEARCHED_MAX = 1000;
const NEW = "New chat";

let cursor = null;
let current = null;
let choose = () => {};

function row(chat) {
  const link = make("a", "", chat.title || NEW, make("span", "", ago(chat.updatedAt)));
  link.href = `/playground/${chat.id}`;
  link.title = chat.title || "";
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return; // opens another tab
    event.preventDefault();
    choose(chat.id);
  });
  const node = make("li", "", link, make("div", "actions",
    button("Rename", "quiet", () => rename(node, chat)), button("Delete", "quiet", () => remove(chat))));
  node.dataset.chat = chat.id;
  node.dataset.title = chat.title || NEW;
  return node;
}

const rows = () => [...$("chat-list").children];
const rowOf = (chatId) => rows().find((node) => node.dataset.chat === chatId);

export async function load(older = false, limit = 30) {
  const at = older && cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
  const page = await call("GET", `/chats?limit=${limit}${at}`);
  cursor = page.nextCursor;
  const added = page.items.map(row);
  if (older) $("chat-list").append(...added);
  else $("chat-list").replaceChildren(...added);
  await mark(current);
}

/** Marks the open chat. One that the list does not show yet is put on top of it. */
export async function mark(chatId) {
  current = chatId;
  if (chatId && !rowOf(chatId)) {
    const chat = await call("GET", `/chats/${chatId}`).catch(() => null); // the chat itself says why it can't be shown
    if (chat && current === chatId && !rowOf(chatId)) $("chat-list").prepend(row(chat));
  }
  for (const node of rows()) {
    if (node.dataset.chat === chatId) node.firstChild.setAttribute("aria-current", "page");
    else node.firstChild.removeAttribute("aria-current");
  }
  const title = rowOf(current)?.dataset.title;
  document.title = `${title && title !== NEW ? `${title} · ` : ""}Playground · Agent workflow service`;
  filter();
}

// --- search -----------------------------------------------------------------------------------------------------

function filter() {
  const sought = $("search").value.trim().toLowerCase();
  for (const node of rows()) node.hidden = !node.dataset.title.toLowerCase().includes(sought);
  $("more-chats").hidden = !cursor;
  $("no-chats").hidden = !sought || rows().some((node) => !node.hidden);
}

/** The service does not search: the titles of all chats are read once, up to SEARCHED_MAX. */
async function search() {
  filter();
  while (cursor && $("search").value.trim() && rows().length < SEARCHED_MAX) await load(true, 100);
}

// --- rename and delete ------------------------------------------------------------------------------------------

function rename(node, chat) {
  const input = make("input");
  Object.assign(input, { value: chat.title || "", required: true, maxLength: 200 });
  input.setAttribute("aria-label", "Title of the chat");
  const form = make("form", "row", input, make("button", "primary", "Save"));
  const back = (title) => {
    const shown = row({ ...chat, title });
    form.parentNode.replaceWith(shown);
    mark(current);
    shown.firstChild.focus();
  };
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      back((await call("PATCH", `/chats/${chat.id}`, { title: input.value })).title);
    } catch (error) {
      notice(error.message, form);
    }
  });
  form.addEventListener("keydown", (event) => { if (event.key === "Escape") { event.stopPropagation(); back(chat.title); } });
  node.replaceChildren(form);
  input.select();
}

function remove(chat) {
  const asked = $("delete-chat");
  asked.querySelector("b").textContent = chat.title || NEW;
  asked.returnValue = "";
  asked.onclose = async () => {
    if (asked.returnValue !== "delete") return;
    try {
      await call("DELETE", `/chats/${chat.id}`);
    } catch (error) {
      notice(error.message);
      return;
    }
    rowOf(chat.id)?.remove();
    announce("The chat is deleted");
    if (current === chat.id) choose(null);
  };
  asked.showModal();
}

export function start(chosen) {
  choose = chosen;
  $("more-chats").addEventListener("click", () => load(true).catch((error) => notice(error.message)));
  $("search").addEventListener("input", () => search().catch((error) => notice(error.message)));
}

/** Starts the page: sign in and out, the address of the chat, the examples. */

import { call, keep, session } from "./api.js";
import * as chats from "./chats.js";
import * as composer from "./composer.js";
import * as conversation from "./conversation.js";
import { showBalance } from "./credits.js";
import { $, button, copy, make, notice, offline, watchScroll } from "./dom.js";
import { EXAMPLES, SCRIPTS } from "./examples.js";
import * as panel from "./panel.js";
import { forget } from "./sent.js";

const chatOf = (path) => path.match(/^\/playground\/(\w+)$/)?.[1] || null;

// --- signing in ---------------------------------------------------------------------------------------------------

async function signIn(credential, asked) {
  keep(credential);
  try {
    await call("GET", "/chats?limit=1");
  } catch (error) {
    if (error.status === 401 || asked) {
      expired(error.message);
      return;
    }
  }
  $("credential").value = "";
  $("sign-in-problem").hidden = true;
  // The message box appears last, so that no one uses it before it is ready.
  await Promise.all([composer.loadCatalogue(), chats.load().catch(() => {})]);
  show(true);
  showBalance();
  showExamples();
  await go(chatOf(location.pathname));
}

function signOut() {
  composer.clear();
  forget();
  history.replaceState(null, "", "/playground");
  leave();
}

/** The address and the message that is being written stay for the next sign-in. */
function expired(problem = "The token is no longer valid. Sign in again.") {
  leave();
  $("sign-in-problem").textContent = problem;
  $("sign-in-problem").hidden = false;
}

function leave() {
  keep("");
  conversation.close();
  $("credits").hidden = $("sign-in-problem").hidden = true;
  $("chat-list").replaceChildren();
  show(false);
  $("credential").focus();
}

function show(signedIn) {
  $("sign-in").hidden = signedIn;
  $("welcome").hidden = false;
  $("examples").hidden = true;
  for (const id of ["composer", "sign-out", "chats", "panel", "toggle-chats", "toggle-panel"]) $(id).hidden = !signedIn;
}

// --- chats --------------------------------------------------------------------------------------------------------

/** Shows a chat, or the page for a new one. The address is set by the caller. */
async function go(chatId) {
  closeDrawers();
  composer.stopEditing();
  $("welcome").hidden = $("examples").hidden = Boolean(chatId);
  chats.mark(chatId);
  if (!chatId) {
    conversation.close();
    $("message").focus();
    return;
  }
  try {
    await conversation.show(chatId);
  } catch (error) {
    if (error.status === 401) expired();
    else notice(error.status === 404 ? "This chat does not exist, or it is another user’s." : error.message);
  }
}

function choose(chatId) {
  history.pushState(null, "", chatId ? `/playground/${chatId}` : "/playground");
  return go(chatId);
}

function started(chatId, isNew) {
  $("welcome").hidden = $("examples").hidden = true;
  if (isNew) history.pushState(null, "", `/playground/${chatId}`);
  chats.mark(chatId);
  chats.load().catch(() => {});
}

function showExamples() {
  const examples = composer.model()?.provider === "demo" ? SCRIPTS : EXAMPLES;
  $("examples").replaceChildren(...examples.map(([title, what, message]) => {
    const node = button("", "", () => composer.sendExample(message));
    node.append(make("b", "", title), make("span", "", what));
    return node;
  }));
}

// --- the parts of the page on a narrow screen ---------------------------------------------------------------------

function drawer(toggle, name) {
  $(toggle).addEventListener("click", () => {
    const open = document.body.classList.toggle(name);
    $(toggle).setAttribute("aria-expanded", String(open));
  });
}

function closeDrawers() {
  document.body.classList.remove("with-chats", "with-panel");
  for (const toggle of ["toggle-chats", "toggle-panel"]) $(toggle).setAttribute("aria-expanded", "false");
}

function showPanel() {
  document.body.classList.add("with-panel");
  $("toggle-panel").setAttribute("aria-expanded", "true");
}

// --- start --------------------------------------------------------------------------------------------------------

conversation.configure({
  describe: composer.describe,
  options: composer.options,
  started,
  edit: composer.edit,
  failed: () => expired(),
  changed: panel.changed,
  mode(name) {
    const before = composer.setMode(name);
    if (name === "send" && before !== name && session.credential) showBalance();
  },
  selected(view, asked) {
    panel.select(view);
    if (!asked) return;
    panel.openTab("timeline", true);
    showPanel();
  },
});
composer.start({ send: conversation.send, answer: conversation.answer, stop: conversation.stop });
chats.start(choose);
panel.start();
watchScroll();
for (const event of ["offline", "online"]) window.addEventListener(event, () => offline(event === "offline"));
drawer("toggle-chats", "with-chats");
drawer("toggle-panel", "with-panel");
document.addEventListener("keydown", ({ key }) => { if (key === "Escape") closeDrawers(); });
$("sign-in").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  signIn($("credential").value.trim().replace(/^Bearer +/i, ""), true);
});
$("copy")?.addEventListener("click", () => copy($("command").textContent, $("copy")));
$("sign-out").addEventListener("click", signOut);
$("new-chat").addEventListener("click", () => choose(null));
$("earlier").addEventListener("click", () => conversation.earlier().catch((error) => notice(error.message)));
for (const picker of ["agent", "model"]) $(picker).addEventListener("change", showExamples);
$("credits").addEventListener("click", () => { panel.openTab("credits", true); showPanel(); });
window.addEventListener("popstate", () => { if (session.credential) go(chatOf(location.pathname)); });

// The address that `make run` prints. Elsewhere another site could sign people in as a user of its own.
const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token && document.body.dataset.local) {
  history.replaceState(null, "", location.pathname);
  await signIn(token, true);
} else if (session.credential) await signIn(session.credential, false);
else show(false);

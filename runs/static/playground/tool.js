/** The card of a tool call: input, result, files, cost. */

import { atEnd, credits, make, notice, pretty, seconds, statusName, until } from "./dom.js";

/** A titled text of the card, shown once. */
function block(card, title, text) {
  const name = title.split(" ")[0].toLowerCase();
  if (card.dataset[name]) return;
  card.dataset[name] = "shown";
  const pre = make("pre", "", text);
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.setAttribute("aria-label", title);
  card.append(make("div", "what", title), pre);
}

export function toolCard() {
  const card = make("details", "card tool");
  card.append(make("summary", "", make("b"), make("span", "pill"), make("span", "cost")));
  return card;
}

/** What a call that takes long says of itself: who has to answer until when, and how far it is. */
function showWait(card, { awaiting, expiresAt, fraction, message, at }) {
  card.querySelector(".wait")?.remove();
  if (!expiresAt && !at) return;
  const who = awaiting === "client" ? "Waits for your app" : "Parked: waits for its tool";
  const bound = expiresAt ? `${who} until ${until(expiresAt)}` : "";
  const share = typeof fraction === "number" ? `${Math.round(fraction * 100)} %` : "";
  card.append(make("p", "hint wait", [bound, share, message].filter(Boolean).join(" · ")));
  card.open = true;
}

/** `data` is the data of an event of a tool call. */
export function showCall(card, data) {
  card.querySelector("b").textContent = data.name;
  showWait(card, data);
  if (!data.status) return; // tool.parked and tool.progress
  const pill = card.querySelector(".pill");
  pill.className = `pill ${data.status}`;
  pill.textContent = statusName(data.status);
  if (data.input) block(card, "Input", pretty(data.input));
  if (data.creditUsed !== undefined) {
    const took = data.durationMs === null ? "" : ` · ${seconds(data.durationMs)}`;
    card.querySelector(".cost").replaceChildren(credits(data.creditUsed), took);
  }
  if (data.errorMessage && !card.dataset.problem) {
    card.dataset.problem = "shown";
    // A person's refusal is no error.
    if (data.status === "FAILED") notice(data.errorMessage, card);
    else card.append(make("p", "hint", data.errorMessage));
    card.open = data.status === "FAILED";
  }
  if (data.resultUrls?.length) {
    const results = make("div", "results");
    for (const url of data.resultUrls) results.append(...file(url));
    card.append(results);
    card.open = true;
  }
}

/** `invocation` is the call as the run shows it: with its result, and with the input of a call that never started. */
export function showRecord(card, invocation) {
  block(card, "Input", pretty(invocation.input));
  if (invocation.result === null) return;
  const cut = invocation.resultTruncated ? "Result (the first 8 KiB)" : "Result";
  block(card, cut, invocation.result);
}

/** The path of a URL of http or https, and the name at its end; null for any other text. */
function parts(url) {
  try {
    const { protocol, pathname } = new URL(url);
    return /^https?:$/.test(protocol) ? { pathname, name: decodeURIComponent(pathname.split("/").pop()) } : null;
  } catch { // not a URL, or an escape that is no character
    return null;
  }
}

function file(url) {
  const found = parts(url);
  if (!found) return [make("span", "", url)];
  const { pathname, name } = found;
  const link = make("a", "", name || url);
  link.href = url;
  link.rel = "noreferrer";
  if (!pathname.startsWith("/files/") || !/\.(svg|png|jpe?g|gif|webp)$/.test(pathname)) return [link];
  const image = make("img");
  image.alt = link.textContent;
  image.addEventListener("load", () => atEnd());
  image.src = pathname; // a path, because the page may be open under another host name
  return [image, link];
}

/** Small helpers for elements, numbers and times. */

export const $ = (id) => document.getElementById(id);

export function make(tag, className, ...content) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...content);
  return node;
}

export function button(label, className, onClick) {
  const node = make("button", className, label);
  node.type = "button";
  node.addEventListener("click", onClick);
  return node;
}

export function svg(tag, attributes, ...content) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...content);
  return node;
}

// --- the chat scrolls with new content while its end is visible -------------------------------------------------

let followed = true;
let reached = 0; // where the chat was scrolled to last

function look() {
  const box = $("scroll");
  followed = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  $("newest").hidden = followed;
}

export function watchScroll() {
  $("scroll").addEventListener("scroll", look);
  $("newest").addEventListener("click", toEnd);
}

export function atEnd(change = () => {}) {
  const box = $("scroll");
  if (box.scrollTop < reached) look(); // scrolled up, which the event says only with the next frame
  change();
  if (followed) box.scrollTop = box.scrollHeight;
  else look();
  reached = box.scrollTop;
}

export function toEnd() {
  followed = true;
  atEnd();
}

export function notice(text, where = $("messages")) {
  const node = make("div", "notice", text);
  node.setAttribute("role", "alert");
  atEnd(() => where.append(node));
}

/** Shows whether the service can be reached. */
export function offline(is) {
  $("offline").hidden = !is;
}

/** Said by a screen reader. Text that streams is said once, when it is complete. */
export function announce(text) {
  $("announcer").textContent = text;
}

export async function copy(text, label) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without https, browsers offer no clipboard
    const area = make("textarea", "unseen", text);
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = label.textContent;
  label.textContent = "Copied";
  announce("Copied");
  setTimeout(() => { label.textContent = before; }, 1500);
}

// --- numbers and times ------------------------------------------------------------------------------------------

/** At most three decimals. An amount under one keeps three digits, so that nothing is rounded to nothing. */
export function number(value) {
  const digits = Math.abs(value) < 1 ? { maximumSignificantDigits: 3 } : { maximumFractionDigits: 3 };
  return new Intl.NumberFormat("en", digits).format(value);
}

const exact = (value) => new Intl.NumberFormat("en", { maximumFractionDigits: 6 }).format(value);
export const counted = (value, one = "credit") => `${number(value)} ${one}${Number(value) === 1 ? "" : "s"}`;

/** An amount of credits; all its decimals are shown on hover. */
export function credits(value, text = counted(value)) {
  const node = make("span", "amount", text);
  node.title = `${exact(value)} credits`;
  return node;
}

/** A status as people read it: as in the admin. */
export const statusName = (status) => status[0].toUpperCase() + status.slice(1).toLowerCase();
export const seconds = (milliseconds) =>
  milliseconds < 100 ? `${Math.round(milliseconds)} ms` : `${number(Math.round(milliseconds / 10) / 100)} s`;

export function ago(time) {
  const minutes = (Date.now() - new Date(time)) / 60000;
  if (minutes < 1) return "just now";
  if (minutes < 60) return `${Math.floor(minutes)} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(time).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

/** Until when, for people: the time, and what is left of it. */
export function until(time) {
  const minutes = Math.max(0, (new Date(time) - Date.now()) / 60000);
  const left = minutes < 90 ? `${Math.ceil(minutes)} min` : minutes < 48 * 60 ? `${Math.round(minutes / 60)} h` : `${Math.round(minutes / 1440)} days`;
  return `${new Date(time).toLocaleString("en", { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", hour12: false })} (in ${left})`;
}

export function pretty(value) {
  const line = JSON.stringify(value);
  return line.length < 90 ? line : JSON.stringify(value, null, 2);
}

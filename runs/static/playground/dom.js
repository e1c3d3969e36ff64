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

export function watchScroll() {
  $("scroll").addEventListener("scroll", ({ target: box }) => {
    followed = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
  });
}

export function atEnd(change = () => {}) {
  change();
  if (followed) $("scroll").scrollTop = $("scroll").scrollHeight;
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

export const number = (value) => new Intl.NumberFormat("en", { maximumFractionDigits: 6 }).format(value);
export const counted = (value, one = "credit") => `${number(value)} ${one}${Number(value) === 1 ? "" : "s"}`;
export const seconds = (milliseconds) => `${number(Math.round(milliseconds / 10) / 100)} s`;

export function ago(time) {
  const minutes = (Date.now() - new Date(time)) / 60000;
  if (minutes < 1) return "just now";
  if (minutes < 60) return `${Math.floor(minutes)} min ago`;
  if (minutes < 24 * 60) return `${Math.floor(minutes / 60)} h ago`;
  return new Date(time).toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export function pretty(value) {
  const line = JSON.stringify(value);
  return line.length < 90 ? line : JSON.stringify(value, null, 2);
}

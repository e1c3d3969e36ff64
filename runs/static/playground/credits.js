/** The user's credits: balance, usage by day as a chart, usage by tool. */

import { call, isPublic } from "./api.js";
import { $, counted, credits, make, number, svg } from "./dom.js";

const DAYS = 30;
const WIDTH = 360, HEIGHT = 130, BASE = 108, TOP = 16;

export async function showBalance() {
  try {
    const { available } = await call("GET", "/me/credits");
    $("credits").replaceChildren(credits(available, counted(Math.floor(available * 10) / 10)));
    $("credits").hidden = false;
  } catch { /* a key may lack that scope */ }
}

export async function show(panel) {
  const { balance, held, available } = await call("GET", "/me/credits");
  const parts = [make("p", "balance", credits(available), " available")];
  if (Number(held)) parts.push(make("p", "hint", `${number(balance)} less ${number(held)} that are held for calls in progress`));
  if (isPublic()) {
    parts.push(make("p", "hint", "The reports of usage need a session token."));
  } else {
    const [{ days }, { groups }] = await Promise.all([
      call("GET", "/me/credits/usage-by-day?period=30d"), call("GET", "/me/credits/usage-summary?period=30d"),
    ]);
    parts.push(make("h2", "", `Credits per day, last ${DAYS} days`), chart(days), make("h2", "", "By tool"), table(groups));
  }
  panel.replaceChildren(...parts);
}

function chart(days) {
  const spent = new Map(days.map((day) => [day.date, Number(day.totalDebited)]));
  const dates = Array.from({ length: DAYS }, (_, at) => new Date(Date.now() - (DAYS - 1 - at) * 86400000).toISOString().slice(0, 10));
  const most = Math.max(...dates.map((date) => spent.get(date) || 0), 0.000001);
  const total = days.reduce((sum, day) => sum + Number(day.totalDebited), 0);
  const step = WIDTH / DAYS;
  const bars = dates.map((date, at) => {
    const height = ((spent.get(date) || 0) / most) * (BASE - TOP);
    return svg("rect", { x: at * step + 1, y: BASE - height, width: step - 2, height, rx: 1.5 },
      svg("title", {}, `${date}: ${counted(spent.get(date) || 0)}`));
  });
  const label = (x, y, anchor, text) => svg("text", { x, y, "text-anchor": anchor }, text);
  return svg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${counted(total)} in ${DAYS} days, at most ${counted(most)} a day` },
    svg("line", { x1: 0, x2: WIDTH, y1: BASE, y2: BASE }), ...bars,
    label(0, 11, "start", `most: ${number(total ? most : 0)}`), label(0, HEIGHT - 6, "start", dates[0]), label(WIDTH, HEIGHT - 6, "end", "today"));
}

function table(groups) {
  const head = make("tr", "", make("th", "", "Tool"), make("th", "", "Uses"), make("th", "", "Credits"));
  const rows = groups.map((group) => make("tr", "", make("td", "", group.displayName), make("td", "", number(group.records)), make("td", "", credits(group.totalDebited, number(group.totalDebited)))));
  return groups.length ? make("table", "usage", make("thead", "", head), make("tbody", "", ...rows)) : make("p", "hint", "Nothing was used yet.");
}

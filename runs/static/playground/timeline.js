/** What happened in a run, in order, with times, tokens and cost. */

import { counted, credits, make, number, seconds, statusName, svg, until } from "./dom.js";

const TONES = { completed: "good", failed: "bad", waiting: "warn" };

export function show(panel, view) {
  if (!view) {
    panel.replaceChildren(make("p", "hint", "The turns, calls, tokens and cost of a run appear here."));
    return;
  }
  const rows = withTurns(rowsOf(view), view.turns);
  bound(rows);
  const start = rows.find((row) => row.time)?.time || null;
  const end = rows.reduce((last, row) => Math.max(last, row.time ? +row.time + (row.took || 0) : 0), 0);
  const list = make("ol", "timeline", ...rows.map((row) => rowNode(row, start, end)));
  panel.replaceChildren(make("h2", "", `Run ${view.id}`), facts(view), list);
  if (!view.events.length) panel.append(make("p", "hint", "“Details” below the answer loads the events of this run."));
}

function facts(view) {
  const list = make("dl", "facts");
  const add = (name, value) => { if (value !== null) list.append(make("dt", "", name), make("dd", "", value)); };
  const retries = view.events.filter((event) => event.type === "model.retrying").length;
  add("Status", statusName(view.status));
  if (!view.run) return list;
  const { usage, totalCreditsUsed, startedAt, finishedAt, resolvedModel, toolInvocations, toolInvocationCount, agent } = view.run;
  add("Cost", credits(totalCreditsUsed));
  add("Turns", number(usage.turns));
  add("Calls", number(toolInvocations?.length ?? toolInvocationCount));
  add("Tokens in", `${number(usage.inputTokens)}${usage.cachedInputTokens ? ` (${number(usage.cachedInputTokens)} cached)` : ""}`);
  add("Tokens out", number(usage.outputTokens));
  add("Retries", number(Math.max(retries, usage.modelRetries)));
  add("Time", startedAt && finishedAt ? seconds(new Date(finishedAt) - new Date(startedAt)) : null);
  add("Model", resolvedModel);
  add("Agent", agent || null);
  return list;
}

/** Rows {time, took, title, about, tone}. Calls have their own times in the run; other events have the time of arrival. */
function rowsOf(view) {
  const calls = new Map((view.run?.toolInvocations || []).map((one) => [one.id, one]));
  const rows = [], byCall = new Map();
  for (const { type, data, time } of view.events) {
    const row = { time: time && new Date(time), exact: Boolean(data.at || data.resolvedAt), title: "", about: "", tone: "" };
    if (type === "run.status") {
      row.title = statusName(data.status);
      row.tone = TONES[data.status] || "";
      row.about = data.errorMessage || "";
    } else if (type === "message.delta") {
      row.title = "Answer";
      if (view.turns.length) continue; // the turn stands for its text
    } else if (type === "tool.started" || type === "tool.completed") {
      const known = byCall.get(data.toolInvocationId) || row;
      const { startedAt } = calls.get(data.toolInvocationId) || {};
      if (startedAt) Object.assign(known, { time: new Date(startedAt), exact: true });
      known.title = `${data.name} · turn ${data.turnIndex}, call ${data.callIndex}`;
      if (type === "tool.completed") {
        known.took = data.durationMs || 0;
        known.tone = data.status === "FAILED" ? "bad" : "";
        const took = data.durationMs === null ? null : seconds(data.durationMs);
        known.about = [statusName(data.status), counted(data.creditUsed), took, data.errorMessage].filter(Boolean).join(" · ");
      }
      if (byCall.has(data.toolInvocationId)) continue;
      byCall.set(data.toolInvocationId, row);
    } else if (type === "tool.parked") {
      row.title = `${data.name} is parked`;
      row.about = `It waits for ${data.awaiting === "client" ? "the app" : "its tool"} until ${until(data.expiresAt)}`;
    } else if (type === "waitpoint.opened") {
      const approval = data.requestPayload.reason ? "Waits for credits" : `Approval of ${data.requestPayload.toolName}`;
      row.title = data.kind === "CREDIT_APPROVAL" ? approval : "Question";
      row.about = data.requestPayload.question || counted(data.requestPayload.estimatedCredits);
    } else if (type === "waitpoint.resolved") {
      row.title = data.status === "COMPLETED" ? "Answered" : "Not answered";
    } else if (type === "model.retrying") {
      row.title = `Retry ${data.attempt}`;
      row.about = `${data.reason}; ${data.model || "no model"} after ${number(data.delaySeconds)} s`;
      row.tone = "warn";
    } else if (type === "context.compacted") {
      row.title = "Context shortened";
      row.about = `${number(data.tokensBefore)} → ${number(data.tokensAfter)} tokens`;
    } else if (type === "message.reset") {
      row.title = "Text withdrawn";
      row.tone = "warn";
    } else continue;
    rows.push(row);
  }
  return rows;
}

/** The turns of the run, each before the first thing that came after it. */
function withTurns(rows, turns) {
  for (const turn of turns) {
    const time = new Date(turn.startedAt), cached = turn.cachedInputTokens ? ` (${number(turn.cachedInputTokens)} cached)` : "";
    const reasoned = turn.reasoningTokens ? ` (${number(turn.reasoningTokens)} reasoning)` : "";
    const tokens = `${number(turn.inputTokens)} tokens in${cached}, ${number(turn.outputTokens)} out${reasoned}`;
    const row = {
      time, exact: true, took: new Date(turn.finishedAt) - time, tone: "",
      title: `Turn ${turn.index} · ${turn.model}`, about: make("span", "", `${tokens} · `, credits(turn.creditUsed)),
    };
    let at = rows.findIndex((one) => one.time && one.time > time);
    if (at < 0) at = rows.length;
    while (at > 0 && !rows[at - 1].time) at -= 1; // a question, whose time is not known, follows its turn
    rows.splice(at, 0, row);
  }
  return rows;
}

/** Times of arrival are later than the service's own, and by another clock: they lie between their neighbours'. */
function bound(rows) {
  let least = null;
  for (const row of rows) {
    if (row.exact) least = row.time;
    else if (row.time && least && row.time < least) row.time = least;
  }
  let most = null;
  for (const row of [...rows].reverse()) {
    if (row.exact) most = row.time;
    else if (row.time && most && row.time > most) row.time = most;
  }
}

function rowNode({ time, took, title, about, tone }, start, end) {
  const after = time && start ? `+${number(Math.max(0, (time - start) / 1000))} s` : "";
  const what = make("div", "", make("b", "", title));
  if (about) what.append(make("p", "", about));
  if (took !== undefined && end > start) {
    const scale = 100 / (end - start);
    const bar = svg("rect", { x: (time - start) * scale, y: 0, width: Math.max(1, took * scale), height: 6 });
    const chart = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, bar);
    what.append(chart);
  }
  return make("li", tone, make("span", "at", after), what);
}

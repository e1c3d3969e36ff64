/** A run in the chat: text, tool calls and questions as they happen, and afterwards what it cost. */

import { call, headers, surface } from "./api.js";
import { announce, atEnd, button, copy, credits, make, notice, offline, seconds, statusName } from "./dom.js";
import { Growing } from "./markdown.js";
import { outcome, questionCard } from "./question.js";
import { FINAL, follow } from "./stream.js";
import { execute } from "./client_tools.js";
import { showCall, showRecord, toolCard } from "./tool.js";

const EVENTS_MAX = 500;
const RESULTS_AFTER = 300;

export class RunView {
  /** `describe(name)` is a tool of the catalogue; `changed(run)` is called after every event. */
  constructor(id, { describe, changed }) {
    Object.assign(this, { id, describe, changed, status: "queued", run: null });
    this.pill = make("span", "pill queued", statusName("queued"));
    this.note = make("span");
    this.actions = make("span", "actions");
    this.body = make("div", "run");
    this.node = make("article", "run", this.body, make("div", "state", this.pill, this.note, this.actions));
    this.node.setAttribute("aria-label", "Answer of the agent");
    this.clear();
  }

  clear() {
    this.body.replaceChildren();
    Object.assign(this, {
      calls: new Map(), waits: new Map(), texts: [], events: [], turns: [], growing: null, question: null, reasoning: null, output: null,
    });
  }

  /** The answer, without the tool calls. */
  get text() {
    return this.texts.map((part) => part.text).join("\n\n").trim();
  }

  /** What the page shows of a finished run before anyone asks for its events. */
  fill(summary, content) {
    this.run = summary;
    this.setStatus(summary.status);
    if (content) this.grow(content);
    this.closeText();
    if (summary.errorMessage) notice(`${summary.errorCode}: ${summary.errorMessage}`, this.body);
    this.sum();
  }

  /** Shows the stream of the run from its beginning. Ends with the run. */
  async play(signal, { live = false } = {}) {
    this.clear();
    this.live = live;
    const url = `${surface()}/runs/${this.id}/stream`;
    await follow(url, headers(), signal, (index, type, data) => atEnd(() => this.happened(index, type, data)), (is) => offline(!is));
    if (signal.aborted) return;
    await this.refresh();
    if (live) announce(this.text ? `The agent answered: ${this.text.slice(0, 2000)}` : `The run is ${this.status}.`);
  }

  happened(index, type, data) {
    this.record(index, type, data);
    switch (type) {
      case "run.status":
        this.setStatus(data.status);
        if (data.errorMessage) notice(`${data.errorCode}: ${data.errorMessage}`, this.body);
        if (FINAL.includes(data.status)) this.closeText();
        break;
      case "message.delta":
        this.grow(this.growing ? data.text : data.text.replace(/^\n+/, ""));
        break;
      case "message.reset": // all text so far is void
        this.closeText();
        for (const part of this.texts) part.node.remove();
        this.texts = [];
        break;
      case "tool.started":
      case "tool.parked":
      case "tool.progress":
      case "tool.completed":
        this.closeText();
        this.showCall(data);
        break;
      case "waitpoint.opened":
        this.closeText();
        this.ask(data);
        break;
      case "waitpoint.resolved":
        this.settle(data);
        break;
    }
    this.changed(this);
  }

  record(index, type, data) {
    const last = this.events.at(-1);
    const time = data.at || data.resolvedAt || (this.live ? new Date().toISOString() : null);
    if (type === "message.delta" && last?.type === type) {
      Object.assign(last, { index, data: { text: (last.data.text + data.text).slice(-500) } });
      return;
    }
    this.events.push({ index, type, data, time });
    if (this.events.length > EVENTS_MAX) this.events.shift();
  }

  setStatus(status) {
    this.status = status;
    this.pill.className = `pill ${status}`;
    this.pill.textContent = statusName(status);
  }

  grow(text) {
    if (!text) return;
    if (!this.growing) {
      const node = make("div", "text live");
      this.body.append(node);
      this.growing = new Growing(node, () => atEnd());
      this.texts.push(this.growing);
    }
    this.growing.add(text);
  }

  closeText() {
    if (!this.growing) return;
    this.growing.show();
    this.growing.node.classList.remove("live");
    this.growing = null;
  }

  showCall(data) {
    let card = this.calls.get(data.toolInvocationId);
    if (!card) {
      card = toolCard();
      this.calls.set(data.toolInvocationId, card);
      this.body.append(card);
    }
    showCall(card, data);
    // A call of a run that is read again may have ended since.
    if (this.live && data.input) execute(data, card);
    // Events have no results. One request for all calls that end at about the same time.
    if (this.live && data.status === "COMPLETED") this.asking ??= setTimeout(() => this.refresh(), RESULTS_AFTER);
  }

  ask(waitpoint) {
    const card = questionCard(waitpoint, this.describe);
    this.question = card;
    this.waits.set(waitpoint.id, card);
    this.body.append(card);
    if (!this.live) return;
    announce(`The agent asks: ${card.querySelector("h2").textContent}`);
    // The card and not its button has the focus, so that a key that is typed now spends nothing.
    if (document.activeElement === document.body || document.activeElement?.closest("#composer")) {
      card.focus({ preventScroll: true });
    }
  }

  settle(waitpoint) {
    const note = make("p", "answered", outcome(waitpoint));
    const card = this.waits.get(waitpoint.id);
    if (card === this.question) this.question = null;
    if (card) card.replaceWith(note);
    else this.body.append(note);
  }

  /** Reads the run: results of its tools, cost and tokens. */
  async refresh() {
    clearTimeout(this.asking);
    this.asking = null;
    try {
      const [run, { items }] = await Promise.all([call("GET", `/runs/${this.id}`), call("GET", `/runs/${this.id}/turns`)]);
      Object.assign(this, { run, turns: items });
    } catch (error) {
      if (error.status === 401) throw error;
      return;
    }
    for (const invocation of this.run.toolInvocations) {
      const card = this.calls.get(invocation.id) || this.cardWithoutEvents(invocation);
      if (card) atEnd(() => showRecord(card, invocation));
    }
    this.showReasoning();
    this.sum();
    this.changed(this);
  }

  /** What the model thought before its answer, folded. */
  showReasoning() {
    const text = this.turns.map((turn) => turn.reasoning).filter(Boolean).join("\n\n");
    if (!text) return;
    if (!this.reasoning) {
      this.reasoning = make("details", "reasoning", make("summary", "", "Reasoning"), make("p"));
      this.body.prepend(this.reasoning);
    }
    this.reasoning.lastChild.textContent = text;
  }

  /** The events of a run are deleted after a time, its calls are not. */
  cardWithoutEvents(invocation) {
    if (!this.run.finishedAt) return null;
    const card = toolCard();
    showCall(card, invocation);
    this.calls.set(invocation.id, card);
    this.body.insertBefore(card, this.texts[0]?.node || null);
    return card;
  }

  sum() {
    const { totalCreditsUsed, startedAt, finishedAt, resolvedModel, limitedBy, output } = this.run;
    if (!finishedAt) return;
    if (output) this.showOutput(output);
    const took = startedAt ? seconds(new Date(finishedAt) - new Date(startedAt)) : null;
    const whose = { model: "of the model", budget: "that the budget allows", credits: "that the credits allow" };
    const cut = limitedBy ? `cut at the output limit ${whose[limitedBy]}` : null;
    const facts = [took, resolvedModel, cut].filter(Boolean).map((fact) => ` · ${fact}`);
    this.note.replaceChildren(credits(totalCreditsUsed), ...facts);
  }

  /** The answer as an object, of a run with an output schema. */
  showOutput(output) {
    const text = JSON.stringify(output, null, 2);
    const pre = make("pre", "", text);
    pre.tabIndex = 0; // so that the keyboard can scroll it
    pre.setAttribute("aria-label", "Output");
    const copyButton = button("Copy", "quiet", () => copy(text, copyButton));
    this.output?.remove();
    this.output = make("div", "output", make("div", "code-head", "Output", copyButton), pre);
    this.body.append(this.output);
  }

  /** The answers to the run's questions, as a client would send them. */
  answers() {
    return this.events.filter(({ type, data }) => type === "waitpoint.resolved" && data.resolvedPayload).map(({ data }) => {
      const { respondedAt, ...given } = data.resolvedPayload;
      return { kind: data.kind, ...given };
    });
  }
}

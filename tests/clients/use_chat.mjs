// A chat of the AI SDK against the service, with the packages as they are: what `useChat` is made of. Sends a message,
// answers what the run asks, and prints the messages that it has at the end, and what it requested.
import { Chat } from "@ai-sdk/react";
import * as version7 from "ai";
import * as version6 from "ai6";
import { Chat as ChatOf6 } from "ai-sdk-react6";

const VERSIONS = { 6: { ...version6, Chat: ChatOf6 }, 7: { ...version7, Chat } };
const { url, token, plans } = JSON.parse(process.argv[2]);
const base = `${url}/ai-sdk/chat`;
const auth = { Authorization: `Bearer ${token}` };
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

// One plan: sends `text`, answers by `approved`, `reason` and `outputs`. The first answer breaks off after `cutAfter`
// chunks, as when a network fails or, with `reload`, when the page is loaded again. With `watched`, a second tab follows.
// With `stop`, the run is stopped in mid-answer. Then the answer is generated again `regenerate` times, and with `twice`
// each time by two clicks.
async function execute(plan) {
  const sdk = VERSIONS[plan.version];
  const requests = [];
  const errors = [];
  let cut = plan.cutAfter ?? null;

  async function send(input, init) {
    const response = await fetch(input, init);
    requests.push(`${init.method} ${response.status}`);
    if (cut === null || !response.body) return response;
    let left = cut;
    cut = null;
    const frames = new TransformStream({
      transform(text, controller) {
        for (const frame of text.split(/(?<=\n\n)/)) {
          if (left === 0) return controller.error(new TypeError("network error"));
          if (frame.includes("data:")) left -= 1;
          controller.enqueue(frame);
        }
      },
    });
    const body = response.body.pipeThrough(new TextDecoderStream()).pipeThrough(frames);
    return new Response(body.pipeThrough(new TextEncoderStream()), response);
  }

  // The server may be away for a while.
  async function load() {
    for (;;) {
      const response = await fetch(`${base}/${encodeURIComponent(plan.id)}/messages`, { headers: auth }).catch(() => null);
      if (response?.ok) return (await response.json()).messages;
      await pause(200);
    }
  }

  function open(messages) {
    return new sdk.Chat({
      id: plan.id,
      messages,
      transport: new sdk.DefaultChatTransport({ api: base, headers: auth, body: { run: plan.run ?? {} }, fetch: send }),
      sendAutomaticallyWhen: (options) =>
        sdk.lastAssistantMessageIsCompleteWithApprovalResponses(options) ||
        sdk.lastAssistantMessageIsCompleteWithToolCalls(options),
      onError: (error) => errors.push(error.message.slice(0, 100)),
    });
  }

  async function settled(chat) {
    while (!["ready", "error"].includes(chat.status)) await pause(10);
  }

  // Answers the first open question; false if there is none.
  async function answer(chat) {
    const message = chat.lastMessage;
    for (const part of message?.role === "assistant" ? message.parts : []) {
      if (part.type !== "dynamic-tool") continue;
      if (part.state === "approval-requested") {
        await chat.addToolApprovalResponse({ id: part.approval.id, approved: plan.approved, reason: plan.reason });
        return true;
      }
      if (part.state === "input-available" && !part.providerExecuted) {
        const output = plan.outputs[part.toolName];
        await chat.addToolOutput({ tool: part.toolName, toolCallId: part.toolCallId, output });
        return true;
      }
    }
    return false;
  }

  async function watch() {
    while (!(await load()).length) await pause(20);
    const tab = open(await load());
    await tab.resumeStream();
    await settled(tab);
    return tab.lastMessage;
  }

  async function stop() {
    while (chat.lastMessage?.role !== "assistant" || chat.lastMessage.parts.at(-1)?.type !== "text") await pause(10);
    await fetch(`${base}/${encodeURIComponent(plan.id)}/stop`, { method: "POST", headers: auth });
  }

  let chat = open([]);
  chat.sendMessage({ text: plan.text });
  while (chat.status === "ready") await pause(5);
  if (plan.stop) await stop();
  const watched = plan.watched ? watch() : null;
  for (let rounds = 0; rounds < 200; rounds += 1) {
    await pause(20);
    await settled(chat);
    if (chat.status === "error") {
      if (plan.reload) chat = open(await load());
      else if (rounds) await pause(100);
      const before = requests.length;
      await chat.resumeStream();
      await settled(chat);
      // The run has ended meanwhile.
      if (requests[before] === "GET 204") chat = open(await load());
      continue;
    }
    if (!(await answer(chat))) break;
  }
  for (let count = 0; count < (plan.regenerate ?? 0); count += 1) {
    const clicks = [chat.regenerate()];
    if (plan.twice) clicks.push(pause(50).then(() => chat.regenerate()));
    await Promise.all(clicks);
  }
  const all = await load();
  const message = chat.lastMessage;
  const counts = [chat.messages.length, all.length];
  return { id: plan.id, message, listed: all.at(-1), counts, watched: await watched, requests, errors };
}

console.log(JSON.stringify(await Promise.all(plans.map(execute))));

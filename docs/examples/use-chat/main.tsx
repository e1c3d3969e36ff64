import { useChat } from "@ai-sdk/react";
import {
  DefaultChatTransport,
  lastAssistantMessageIsCompleteWithApprovalResponses as approvalsAreGiven,
  lastAssistantMessageIsCompleteWithToolCalls as answersAreGiven,
  TypeValidationError,
  type DynamicToolUIPart,
  type UIMessage,
} from "ai";
import { StrictMode, type FormEvent } from "react";
import { createRoot } from "react-dom/client";

type Message = UIMessage<{ creditsUsed?: number; errorCode?: string }>;

const api: string = import.meta.env.VITE_API ?? "http://127.0.0.1:8000/api/v1";
const kept = sessionStorage;
kept.token ??= prompt("Session token") ?? "";
kept.chat ??= crypto.randomUUID(); // the app's own name of the chat; the first message makes the chat
const base = `${api}/ai-sdk/chat`;
const headers = () => ({ Authorization: `Bearer ${kept.token}` });
const transport = new DefaultChatTransport<Message>({
  api: base,
  headers,
  // The last message is enough. With all messages and their files, a request would soon be too large.
  prepareSendMessagesRequest: ({ id, messages, trigger, messageId, body }) => ({
    body: { ...body, id, messages: messages.slice(-1), trigger, messageId },
  }),
});

async function load(): Promise<Message[]> {
  const messages: Message[] = [];
  for (let page = ""; ; ) {
    const answer = await fetch(`${base}/${kept.chat}/messages${page}`, { headers: headers() });
    if (answer.status === 401) {
      if (kept.token) location.reload(); // the page asks for another token
      kept.removeItem("token");
    }
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    messages.push(...body.messages);
    if (!body.nextCursor) return messages;
    page = `?cursor=${body.nextCursor}`;
  }
}

// A refused request has the service's answer as its message.
const textOf = ({ message }: Error) => (message.startsWith('{"error"') ? JSON.parse(message).error.message : message);

function Chat({ messages }: { messages: Message[] }) {
  const chat = useChat<Message>({
    id: kept.chat,
    messages,
    resume: true, // after a reload, the answer that is being written
    transport,
    sendAutomaticallyWhen: (state) => approvalsAreGiven(state) || answersAreGiven(state),
    // The connection is lost, but not the run. Version 6 also stops when a worker was lost, and text is sent again.
    onError: (error) => (error instanceof TypeError || TypeValidationError.isInstance(error)) && later(),
  });
  // A message without an answer may not have arrived. The same message starts one run, however often it is sent.
  const again = () =>
    chat.messages.at(-1)?.role === "user"
      ? chat.sendMessage()
      : load().then(chat.setMessages).then(() => chat.resumeStream(), later);
  const later = () => setTimeout(again, 1000);
  const works = chat.status === "submitted" || chat.status === "streaming";

  function send(event: FormEvent<HTMLFormElement>) {
    event.preventDefault();
    chat.sendMessage({ text: String(new FormData(event.currentTarget).get("message")) });
    event.currentTarget.reset();
  }
  function edit({ id, parts }: Message) {
    const text = prompt("Message", parts.map((part) => (part.type === "text" ? part.text : "")).join(""));
    if (text) chat.stop().then(() => chat.sendMessage({ text, messageId: id }));
  }
  // chat.stop() would only leave the answer alone.
  const stop = () => fetch(`${base}/${kept.chat}/stop`, { method: "POST", headers: headers() });
  function call(part: DynamicToolUIPart) {
    if (part.state === "approval-requested") {
      const { id, descriptor } = part.approval; // topUpUrl: the run waits for credits
      const { estimatedCredits, topUpUrl } = descriptor as { estimatedCredits: number; topUpUrl?: string };
      return (
        <div className="card">
          <pre>{`${part.toolName} wants to spend ${estimatedCredits} credits: ${JSON.stringify(part.input, null, 2)}`}</pre>
          {topUpUrl && <a href={topUpUrl} target="_blank">Buy credits</a>}
          <button disabled={works} onClick={() => chat.addToolApprovalResponse({ id, approved: false })}>Refuse</button>
          <button disabled={works} onClick={() => chat.addToolApprovalResponse({ id, approved: true })}>Approve</button>
        </div>
      );
    }
    if (part.toolName === "ask_user" && part.state === "input-available") {
      const answer = (event: FormEvent<HTMLFormElement>) => {
        event.preventDefault();
        const output = String(new FormData(event.currentTarget).get("answer"));
        chat.addToolOutput({ tool: "ask_user", toolCallId: part.toolCallId, output });
      };
      return (
        <form className="card" onSubmit={answer}>
          <pre>{(part.input as { question: string }).question}</pre>
          <input name="answer" aria-label="Answer" required />
          <button disabled={works}>Answer</button>
        </form>
      );
    }
    return <p className="note">{`${part.toolName}: ${part.errorText ?? part.state}`}</p>;
  }

  return (
    <>
      {chat.messages.map((message) => (
        <article key={message.id} className={message.role}>
          {message.parts.map((part, index) => (
            <div key={index}>
              {part.type === "text" && <p>{part.text}</p>}
              {part.type === "dynamic-tool" && call(part)}
            </div>
          ))}
          {message.role === "user" && <button onClick={() => edit(message)}>Edit</button>}
          {message.metadata?.errorCode && <p className="note">{message.metadata.errorCode}</p>}
          {message.metadata?.creditsUsed !== undefined && <p className="note">{message.metadata.creditsUsed} credits</p>}
        </article>
      ))}
      {chat.error && <p className="note">{textOf(chat.error)}</p>}
      <form onSubmit={send}>
        <textarea name="message" aria-label="Message" required />
        <button disabled={works}>Send</button>
        <button type="button" onClick={() => (works ? stop() : chat.regenerate())}>{works ? "Stop" : "Regenerate"}</button>
      </form>
    </>
  );
}

const root = createRoot(document.querySelector("main")!);
load().then(
  (messages) => root.render(<StrictMode><Chat messages={messages} /></StrictMode>),
  (error: Error) => root.render(<p className="note">{error.message}</p>),
);

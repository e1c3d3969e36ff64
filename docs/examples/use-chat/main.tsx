import { useChat } from "@ai-sdk/react";
import {
  DefaultChatTransport,
  lastAssistantMessageIsCompleteWithApprovalResponses as approvalsAreGiven,
  lastAssistantMessageIsCompleteWithToolCalls as answersAreGiven,
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
const transport = new DefaultChatTransport<Message>({ api: base, headers });

async function load(): Promise<Message[]> {
  const messages: Message[] = [];
  for (let page = ""; ; ) {
    const answer = await fetch(`${base}/${kept.chat}/messages${page}`, { headers: headers() });
    if (answer.status === 401) kept.removeItem("token"); // the page asks for it when it is loaded again
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    messages.push(...body.messages);
    if (!body.nextCursor) return messages;
    page = `?cursor=${body.nextCursor}`;
  }
}

function Chat({ messages }: { messages: Message[] }) {
  const chat = useChat<Message>({
    id: kept.chat,
    messages,
    resume: true, // after a reload, the answer that is being written
    transport,
    sendAutomaticallyWhen: (state) => approvalsAreGiven(state) || answersAreGiven(state),
    onError: (error) => error instanceof TypeError && later(), // the connection is lost, but not the run
  });
  const again = () => load().then(chat.setMessages).then(() => chat.resumeStream(), later);
  const later = () => setTimeout(again, 1000);
  const works = chat.status === "submitted" || chat.status === "streaming";

  function send(event: FormEvent<HTMLFormElement>) {
    event.preventDefault();
    chat.sendMessage({ text: String(new FormData(event.currentTarget).get("message")) });
    event.currentTarget.reset();
  }
  function edit({ id, parts }: Message) {
    const text = prompt("Message", parts.map((part) => (part.type === "text" ? part.text : "")).join(""));
    if (text) chat.sendMessage({ text, messageId: id });
  }
  // chat.stop() would only leave the answer alone.
  const stop = () => fetch(`${base}/${kept.chat}/stop`, { method: "POST", headers: headers() });
  function call(part: DynamicToolUIPart) {
    if (part.state === "approval-requested") {
      const { id, requestReason } = part.approval;
      return (
        <div className="card">
          <pre>{`${part.toolName} wants to spend ${requestReason}: ${JSON.stringify(part.input, null, 2)}`}</pre>
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
          {message.metadata?.creditsUsed !== undefined && <p className="note">{message.metadata.creditsUsed} credits</p>}
        </article>
      ))}
      {chat.error && <p className="note">{chat.error.message}</p>}
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

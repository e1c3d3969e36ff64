// A run by the client that @hey-api/openapi-ts made: this must compile under strict rules, and then work.
import {
  publicChatsCreate,
  publicChatsMessagesList,
  publicChatsRunsCreate,
  publicMessagesRetrieve,
  publicRunsList,
  publicRunsRetrieve,
} from "./generated";
import { createClient } from "./generated/client";
import type { ApiError } from "./generated";

const [baseUrl = "", apiKey = ""] = process.argv.slice(2);
const client = createClient({ baseUrl, auth: apiKey });

function given<T>(answer: { data?: T; error?: ApiError }): T {
  if (answer.data === undefined) throw new Error(answer.error?.error.code ?? "no answer");
  return answer.data;
}

async function main(): Promise<void> {
  const chat = given(await publicChatsCreate({ client, body: { title: "Generated" } }));
  const path = { chatId: chat.id };
  const body = { message: "/say done", metadata: { order: "A-2" } };
  let run = given(await publicChatsRunsCreate({ client, path, body }));
  for (let tries = 0; tries < 600 && run.status !== "completed"; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    run = given(await publicRunsRetrieve({ client, path: { runId: run.id } }));
  }
  const filters = { status: ["completed" as const, "failed" as const], metadata: { "metadata.order": "A-2" } };
  const listed = given(await publicRunsList({ client, query: filters })).items.map((each) => each.id);
  const order = "desc" as const;
  const messages = given(await publicChatsMessagesList({ client, path, query: { order, runId: run.id } })).items;
  const newest = given(await publicMessagesRetrieve({ client, path: { messageId: messages[0]?.id ?? "" } }));
  const missing = await publicRunsRetrieve({ client, path: { runId: "run_1" } });
  const code = missing.error?.error.code;
  const { status, answer, finishReason, metadata, usage } = run;
  const shown = { answer, finishReason, metadata, turns: usage.turns, said: newest.content };
  console.log(JSON.stringify({ status, listed: listed.join() === run.id, code, ...shown }));
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});

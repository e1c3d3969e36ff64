// A run on both surfaces by a client of types that openapi-typescript made: this must compile under strict rules, and
// then work.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

const [baseUrl = "", sessionToken = "", apiKey = ""] = process.argv.slice(2);

function clientOf(credential: string) {
  const headers = { Authorization: `Bearer ${credential}` };
  // As the document says. The client's own default is deepObject.
  return createClient<paths>({ baseUrl, headers, querySerializer: { object: { style: "form", explode: true } } });
}

function given<T>(answer: { data?: T; error?: components["schemas"]["ApiError"] }): T {
  if (answer.data === undefined) throw new Error(answer.error?.error.code ?? "no answer");
  return answer.data;
}

async function until<T>(look: () => Promise<T | undefined>): Promise<T> {
  for (let tries = 0; tries < 600; tries += 1) {
    const found = await look();
    if (found !== undefined) return found;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  throw new Error("it did not come to pass");
}

async function main(): Promise<void> {
  const session = clientOf(sessionToken);
  const open = clientOf(apiKey);
  const chat = given(await session.POST("/api/v1/chats", { body: { title: "Generated" } }));
  const started = given(
    await open.POST("/api/public/v1/chats/{chatId}/runs", {
      params: { path: { chatId: chat.id } },
      body: {
        message: '/call draw_chart {"title": "T", "series": [1, 2]}\n/call calculate {"expression": "6*7"}\n/say done',
        metadata: { order: "A-1" },
      },
    }),
  );
  const params = { path: { runId: started.id } };
  const question = await until(async () => {
    const run = given(await open.GET("/api/public/v1/runs/{runId}", { params }));
    return run.pendingWaitpoint ?? undefined;
  });
  given(
    await open.POST("/api/public/v1/waitpoints/{waitpointId}/respond", {
      params: { path: { waitpointId: question.id } },
      body: { kind: "CREDIT_APPROVAL", approved: false, reason: "Too dear." },
    }),
  );
  const run = await until(async () => {
    const now = given(await session.GET("/api/v1/runs/{runId}", { params }));
    return now.status === "completed" ? now : undefined;
  });
  const query = { status: ["completed", "failed"] as ("completed" | "failed")[], metadata: { "metadata.order": "A-1" } };
  const page = given(await open.GET("/api/public/v1/runs", { params: { query: { ...query, model: "demo" } } }));
  const listed = page.items.map((each) => each.id).join() === run.id;
  const messages = given(
    await session.GET("/api/v1/chats/{chatId}/messages", {
      params: { path: { chatId: chat.id }, query: { order: "desc", runId: run.id } },
    }),
  );
  const newest = given(
    await open.GET("/api/public/v1/messages/{messageId}", {
      params: { path: { messageId: messages.items[0]?.id ?? "" } },
    }),
  );
  const endpoint = given(
    await session.POST("/api/v1/webhooks", { body: { url: "http://127.0.0.1:9/hook", extendedEvents: true } }),
  );
  const missing = await session.GET("/api/v1/runs/{runId}", { params: { path: { runId: "run_1" } } });
  const code = missing.error?.error.code;
  const calls = run.toolInvocations.map(({ name, status, result, creditUsed }) => ({ name, status, result, creditUsed }));
  const { status, answer, finishReason, metadata } = run;
  const turns = run.usage.inputTokens > 0 ? run.usage.turns : 0;
  const extended = endpoint.extendedEvents;
  const roles = messages.items.map((message) => message.role);
  const said = newest.content;
  console.log(
    JSON.stringify({ status, listed, code, calls, answer, finishReason, metadata, turns, extended, roles, said }),
  );
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});

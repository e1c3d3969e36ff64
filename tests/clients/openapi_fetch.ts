// A run on both surfaces by a client of types that openapi-typescript made: this must compile under strict rules, and
// then work.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema";

const [baseUrl = "", sessionToken = "", apiKey = ""] = process.argv.slice(2);

function clientOf(credential: string) {
  return createClient<paths>({ baseUrl, headers: { Authorization: `Bearer ${credential}` } });
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
      body: { message: '/call draw_chart {"title": "T", "series": [1, 2]}\n/say done' },
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
      body: { kind: "CREDIT_APPROVAL", approved: true },
    }),
  );
  const run = await until(async () => {
    const now = given(await session.GET("/api/v1/runs/{runId}", { params }));
    return now.status === "completed" ? now : undefined;
  });
  const page = given(await open.GET("/api/public/v1/runs", { params: { query: { limit: 5 } } }));
  const listed = page.items.some((each) => each.id === run.id);
  const missing = await session.GET("/api/v1/runs/{runId}", { params: { path: { runId: "run_1" } } });
  const code = missing.error?.error.code;
  const calls = run.toolInvocations.map((call) => ({ name: call.name, status: call.status, used: call.creditUsed }));
  console.log(JSON.stringify({ status: run.status, listed, code, calls }));
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});

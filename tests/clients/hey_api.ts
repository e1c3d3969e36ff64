// A run by the client that @hey-api/openapi-ts made: this must compile under strict rules, and then work.
import { publicChatsCreate, publicChatsRunsCreate, publicRunsList, publicRunsRetrieve } from "./generated";
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
  const body = { message: "/say done" };
  let run = given(await publicChatsRunsCreate({ client, path: { chatId: chat.id }, body }));
  for (let tries = 0; tries < 600 && run.status !== "completed"; tries += 1) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    run = given(await publicRunsRetrieve({ client, path: { runId: run.id } }));
  }
  const listed = given(await publicRunsList({ client, query: { limit: 5 } })).items.map((each) => each.id);
  const missing = await publicRunsRetrieve({ client, path: { runId: "run_1" } });
  const code = missing.error?.error.code;
  console.log(JSON.stringify({ status: run.status, listed: listed.includes(run.id), code }));
}

main().catch((error: unknown) => {
  console.error(error);
  process.exit(1);
});

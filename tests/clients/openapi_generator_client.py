"""A run by the client that openapi-generator made, for the interpreter that has what such clients need."""

import json
import sys
import time

folder, url, key = sys.argv[1:]
sys.path.insert(0, folder)

import agents  # noqa: E402


def main() -> dict[str, object]:
    configuration = agents.Configuration(host=url, access_token=key)
    with agents.ApiClient(configuration) as client:
        chats, runs = agents.ChatsApi(client), agents.RunsApi(client)
        chat = chats.public_chats_create(chat_input_request=agents.ChatInputRequest(title="Generated"))
        body = agents.RunInputRequest(message="/say done", metadata={"order": "A-3"})
        run = chats.public_chats_runs_create(chat.id, body)
        for _ in range(600):
            run = runs.public_runs_retrieve(run.id)
            if run.status == "completed":
                break
            time.sleep(0.05)
        filters = {"status": ["completed", "failed"], "metadata": {"metadata.order": "A-3"}}
        listed = [each.id for each in runs.public_runs_list(model="demo", **filters).items]
        newest, *others = chats.public_chats_messages_list(chat.id, order="desc", run_id=run.id).items
        try:
            runs.public_runs_retrieve("run_1")
        except agents.ApiException as error:
            code = agents.ApiError.from_json(error.body).error.code
        return {
            "status": run.status,
            "listed": listed == [run.id],
            "code": code,
            "answer": run.answer,
            "finishReason": run.finish_reason,
            "metadata": run.metadata,
            "turns": run.usage.turns,
            "said": chats.public_messages_retrieve(newest.id).content,
        }


print(json.dumps(main()))

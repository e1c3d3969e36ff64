"""The fields of a run that come from its execution or from its request (docs/resources.md)."""


def test_answer_is_the_content_of_the_assistants_message(bench, public):
    asking = bench.ask("/say Before\n/ask Which colour?\n/say You said {result}.")
    assert asking["answer"] == "Before" == bench.content(asking)
    bench.respond(asking, kind="CLARIFICATION", answer="blue")
    ended = bench.wait(asking["id"])
    assert ended["answer"] == "Before\n\nYou said blue." == bench.content(ended)
    assert public.get(f"/api/public/v1/runs/{ended['id']}").json()["answer"] == ended["answer"]
    assert bench.cancel(ended["id"])["answer"] == ended["answer"]


def test_a_run_that_has_not_executed_has_no_answer(session, user):
    chat = session.post("/api/v1/chats", {}, format="json").json()["id"]
    run = session.post(f"/api/v1/chats/{chat}/runs", {"message": "Hello"}, format="json").json()
    assert run["answer"] is None
    assert session.get(f"/api/v1/runs/{run['id']}").json()["answer"] is None

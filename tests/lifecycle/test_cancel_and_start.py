"""``onActiveRun: cancel``: a run that takes the place of the chat's others."""

import pytest

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("message", ["/wait 30", "/ask Which?"])
def test_a_run_that_cancels_the_others_follows_them(bench, message):
    active = bench.start(message)
    bench.wait(active["id"], "running", "waiting")
    queued = bench.start("later", active["chatId"], onActiveRun="enqueue")
    new = bench.wait(bench.start("/say now", active["chatId"], onActiveRun="cancel")["id"])
    assert (new["status"], new["answer"]) == ("completed", "now")
    assert [bench.get(run["id"])["status"] for run in (active, queued)] == ["cancelled", "cancelled"]
    messages = bench.http.get(f"/chats/{active['chatId']}/messages").json()["items"]
    assert [message["content"] for message in messages if message["role"] == "user"][-1] == "/say now"


def test_a_wrong_request_cancels_nothing(bench):
    active = bench.start("/wait 30")
    bench.wait(active["id"], "running")
    body = {"message": "Hi", "onActiveRun": "cancel", "model": "none"}
    assert bench.http.post(f"/chats/{active['chatId']}/runs", body).status_code == 400
    assert bench.get(active["id"])["cancelRequestedAt"] is None


def test_in_an_idle_chat_nothing_is_cancelled(bench):
    first = bench.finish("/say one")
    new = bench.wait(bench.start("/say two", first["chatId"], onActiveRun="cancel")["id"])
    assert (new["status"], bench.get(first["id"])["status"]) == ("completed", "completed")

"""A chat in the terminal: TOKEN=… python chat.py. It needs requests. docs/examples/README.md explains it."""

import contextlib
import json
import os
import uuid

import requests
from requests.adapters import HTTPAdapter, Retry

API = os.environ.get("API", "http://127.0.0.1:8000/api/v1")  # with an API key: …/api/public/v1
http = requests.Session()
http.headers["Authorization"] = f"Bearer {os.environ['TOKEN']}"
retry = Retry(5, backoff_factor=1, status_forcelist=[429, 503], allowed_methods=None, raise_on_status=False)
http.mount(API, HTTPAdapter(max_retries=retry))  # it waits as Retry-After says; a key makes repeated POSTs safe


def send(method, path, **options):
    answer = http.request(method, API + path, headers={"Idempotency-Key": str(uuid.uuid4())}, timeout=60, **options)
    if not answer.ok:
        raise SystemExit(f"{answer.status_code}: {answer.json()['error']['message']}")
    return answer


def events(run_id):
    last, status, event = 0, "queued", {}
    while status not in ("completed", "failed", "cancelled"):  # the stream may end before the run does
        with contextlib.suppress(requests.RequestException):
            for line in send("GET", f"/runs/{run_id}/stream", params={"after": last}, stream=True).iter_lines():
                name, _, value = line.decode().partition(": ")
                if name:
                    event[name] = value
                elif "data" in event:  # the empty line after an event
                    last, data = int(event.get("id", last)), json.loads(event.pop("data"))
                    status = data["status"] if event["event"] == "run.status" else status
                    yield event["event"], data


def respond(waitpoint):
    asked, body = waitpoint["requestPayload"], {"kind": waitpoint["kind"]}
    if asked.get("reason"):  # the run waits for credits or a higher budget; it goes on by itself when credits have come
        print(f"\nThe next step needs {asked['estimatedCredits']} credits; {asked['threshold']} are left.")
        print("Buy credits:", asked["topUpUrl"] or "ask the operator")
        body["approved"] = input("Enter to try again, or end: ").strip() != "end"
    elif waitpoint["kind"] == "CREDIT_APPROVAL":
        print(f"\n{asked['toolName']} may cost {asked['estimatedCredits']} credits:", json.dumps(asked["input"]))
        reply = input("yes, or why not: ").strip()
        body |= {"approved": True} if reply == "yes" else {"approved": False, "reason": reply or "No."}
    else:
        print("\n" + "\n- ".join([asked["question"], *asked.get("options", [])]))
        body["answer"] = input("answer: ").strip() or "No answer."
    send("POST", f"/waitpoints/{waitpoint['id']}/respond", json=body)


chat = send("POST", "/chats", json={}).json()["id"]
while message := input("you: ").strip():
    run = send("POST", f"/chats/{chat}/runs", json={"message": message}).json()
    for kind, data in events(run["id"]):
        if kind == "waitpoint.opened":
            respond(data)
        elif kind == "tool.completed":
            for url in data["resultUrls"]:
                print(url)
        elif kind in ("message.delta", "message.reset"):
            print(data.get("text", "\n"), end="", flush=True)
    run = send("GET", f"/runs/{run['id']}").json()
    print(f"\n[{run['errorMessage'] or run['status']}, {run['totalCreditsUsed']} credits]")

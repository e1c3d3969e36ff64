"""A shop of credits: SERVER_KEY=aws_… python shop.py. It needs requests. docs/examples/README.md explains it."""

import html
import os
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote

import requests

API, USER = os.environ.get("API", "http://127.0.0.1:8000/api/v1"), "shopper"  # your sign-in knows who it is
PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>Shop</title>
<h1>{available} credits</h1>
<form method="post" action="/pay"><input type="hidden" name="payment" value="{payment}"><button>Buy 25</button></form>
<form method="post" action="/ask"><label>Message <input name="message" required></label> <button>Ask</button></form>
<h2>Runs</h2><ul>{runs}</ul>"""


def send(method, path, body=None, key=os.environ["SERVER_KEY"]):
    answer = requests.request(method, API + path, headers={"Authorization": f"Bearer {key}"}, json=body, timeout=30)
    answer.raise_for_status()
    return answer.json()


def paid(payment):  # your payment provider's webhook calls it, as often as it likes: a reference grants once
    body = {"amount": "25", "reference": payment, "reason": "25 credits"}
    send("POST", f"/users/{quote(USER, safe='')}/credits/grants", body)


def line(run):
    state = "waits for credits" if run["pendingWaitpoint"] else run["status"]
    return f"<li>{state}: {html.escape(run['answer'] or '')} ({run['totalCreditsUsed']} credits)</li>"


class Shop(BaseHTTPRequestHandler):
    def do_GET(self):
        token = send("POST", "/session-tokens", {"sub": USER})["token"]
        ids = [run["id"] for run in send("GET", "/runs?limit=5", key=token)["items"]]
        shown = {"available": send("GET", "/me/credits", key=token)["available"], "payment": uuid.uuid4()}
        runs = "".join(line(send("GET", f"/runs/{run_id}", key=token)) for run_id in ids)
        self.answer(200, "Content-Type", "text/html; charset=utf-8", PAGE.format(**shown, runs=runs).encode())

    def do_POST(self):
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if self.path == "/pay":
            paid(form["payment"][0])
        elif self.path == "/ask":
            token = send("POST", "/session-tokens", {"sub": USER})["token"]
            path = f"/chats/{send('POST', '/chats', {}, key=token)['id']}/runs"
            send("POST", path, {"message": form["message"][0], "onCreditsExhausted": "wait"}, key=token)
        self.answer(303, "Location", "/")

    def answer(self, status, header, value, body=b""):
        self.send_response(status)
        self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("SHOP_PORT", "9100"))), Shop).serve_forever()

/** The user's webhook endpoint: its state, a test event, and the newest deliveries. */

import { call, isPublic } from "./api.js";
import { ago, announce, button, make, notice, statusName } from "./dom.js";

const DELIVERIES = 20;
const TONES = { DELIVERED: "good", DEAD: "bad" };

export async function show(panel) {
  if (isPublic()) {
    panel.replaceChildren(make("p", "hint", "Webhooks need a session token."));
    return;
  }
  const endpoint = await call("GET", "/webhooks").catch((error) => {
    if (error.status !== 404) throw error;
    return null;
  });
  if (!endpoint) {
    panel.replaceChildren(make("p", "hint", "You have no endpoint. ", guide("POST /webhooks makes one.")));
    return;
  }
  const { items } = await call("GET", `/webhooks/deliveries?limit=${DELIVERIES}`);
  const test = button("Send a test event", "", async () => {
    test.disabled = true;
    try {
      await call("POST", "/webhooks/test", {});
      announce("The test event is sent");
      await show(panel);
    } catch (error) {
      notice(error.message, panel);
      test.disabled = false;
    }
  });
  panel.replaceChildren(
    make("h2", "", "Your endpoint"),
    make("p", "address", endpoint.url),
    make("p", "hint", endpoint.enabled ? "" : "It is switched off: nothing is sent. "),
    make("div", "row", test, button("Refresh", "quiet", () => show(panel).catch((error) => notice(error.message, panel)))),
    make("h2", "", "Newest deliveries"),
    items.length ? make("ol", "timeline", ...items.map(row)) : make("p", "hint", "Nothing was sent yet. ", guide("What is sent, and how to verify it")),
  );
}

function guide(text) {
  const link = make("a", "", text);
  link.href = "/docs/webhooks";
  return link;
}

function row({ eventType, status, attempts, createdAt }) {
  const last = attempts.at(-1);
  const answer = last && (last.error || `HTTP ${last.statusCode}, ${last.durationMs} ms`);
  const about = [statusName(status), attempts.length > 1 ? `attempt ${attempts.length}` : null, answer].filter(Boolean).join(" · ");
  return make("li", TONES[status] || "", make("span", "at", ago(createdAt)), make("div", "", make("b", "", eventType), make("p", "", about)));
}

/** The card of a waitpoint: an approval that shows what would be run, or a question. */

import { call } from "./api.js";
import { button, counted, make, notice, pretty } from "./dom.js";

let ids = 0;

export function questionCard(waitpoint, describe, answered) {
  const card = make("section", "card question");
  const title = make("h2");
  card.tabIndex = -1;
  title.id = `question-${(ids += 1)}`;
  card.setAttribute("aria-labelledby", title.id);
  card.append(title);
  const answer = async (body) => {
    const controls = card.querySelectorAll("button, input");
    for (const control of controls) control.disabled = true;
    try {
      const given = { kind: waitpoint.kind, ...body };
      await call("POST", `/waitpoints/${waitpoint.id}/respond`, given);
      answered(given);
    } catch (error) {
      notice(error.message, card);
      for (const control of controls) control.disabled = false;
    }
  };
  if (waitpoint.kind === "CREDIT_APPROVAL") approval(card, title, waitpoint.requestPayload, describe, answer);
  else clarification(card, title, waitpoint.requestPayload, answer);
  return card;
}

function approval(card, title, asked, describe, answer) {
  title.textContent = `Spend up to ${counted(asked.estimatedCredits)} on ${asked.toolName}?`;
  const about = describe(asked.toolName);
  const facts = make("dl");
  const add = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
  add("Tool", about ? `${asked.toolName} · ${about.description}` : asked.toolName);
  add("Cost", `at most ${counted(asked.estimatedCredits)}; over ${counted(asked.threshold)} a person decides`);
  const input = make("pre", "", pretty(asked.input));
  input.tabIndex = 0;
  input.setAttribute("aria-label", "Input of the call");
  const reason = make("input");
  reason.maxLength = 1000;
  reason.placeholder = "optional; the model reads it";
  const refuse = () => answer({ approved: false, ...(reason.value.trim() ? { reason: reason.value.trim() } : {}) });
  card.append(
    facts, input,
    make("div", "row",
      button("Approve", "primary", () => answer({ approved: true })),
      make("label", "", "Reason of a refusal", reason),
      button("Refuse", "", refuse)),
  );
}

function clarification(card, title, asked, answer) {
  title.textContent = asked.question;
  card.append(make("p", "", "The run waits for your answer."));
  if (asked.options?.length) {
    card.append(make("div", "row", ...asked.options.map((option) => button(option, "", () => answer({ answer: option })))));
  }
  const input = make("input");
  input.required = true;
  input.maxLength = 10000;
  const form = make("form", "row", make("label", "", "Your answer", input), make("button", "primary", "Answer"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    answer({ answer: input.value });
  });
  card.append(form);
}

/** What stays of a waitpoint that is over. */
export function outcome(waitpoint) {
  const { requestPayload: asked, resolvedPayload: given } = waitpoint;
  if (waitpoint.kind === "CREDIT_APPROVAL") {
    const what = `${asked.toolName} for up to ${counted(asked.estimatedCredits)}`;
    if (!given) return `No one decided about ${what}.`;
    const why = given.reason ? `: ${given.reason}` : "";
    return `${given.approved ? "Approved" : "Refused"}: ${what}${why}`;
  }
  return given ? `${asked.question} — ${given.answer}` : `${asked.question} — not answered.`;
}

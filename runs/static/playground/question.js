/** The card of a waitpoint: an approval that shows what would be run, or a question. */

import { call } from "./api.js";
import { button, counted, make, notice, pretty, until } from "./dom.js";
import { schemaForm } from "./form.js";

let ids = 0;

/** `card.answer(text)`, if the question can be answered by a text, resolves to whether the answer was accepted. */
export function questionCard(waitpoint, describe) {
  const card = make("section", "card question");
  const title = make("h2");
  card.tabIndex = -1;
  title.id = `question-${(ids += 1)}`;
  card.setAttribute("aria-labelledby", title.id);
  card.append(title);
  const answer = async (body) => {
    const controls = card.querySelectorAll("button, input, select, textarea");
    for (const control of controls) control.disabled = true;
    try {
      const given = { kind: waitpoint.kind, ...body };
      await call("POST", `/waitpoints/${waitpoint.id}/respond`, given);
      return true;
    } catch (error) {
      notice(error.message, card);
      for (const control of controls) control.disabled = false;
      return false;
    }
  };
  if (waitpoint.kind === "CREDIT_APPROVAL") approval(card, title, waitpoint.requestPayload, describe, answer);
  else if (waitpoint.requestPayload.schema) {
    title.textContent = waitpoint.requestPayload.question;
    card.append(make("p", "", "A tool asks for this. It gets what you send."), schemaForm(waitpoint.requestPayload.schema, answer));
  } else {
    clarification(card, title, waitpoint.requestPayload, answer);
    card.answer = (text) => answer({ answer: text });
  }
  card.append(make("p", "hint", `Open until ${until(waitpoint.expiresAt)}. Then the run fails.`));
  return card;
}

function approval(card, title, asked, describe, answer) {
  if (asked.reason) {
    outOfCredits(card, title, asked, answer);
    return;
  }
  title.textContent = `Spend up to ${counted(asked.estimatedCredits)} on ${asked.toolName}?`;
  const about = describe(asked.toolName);
  const facts = make("dl");
  const add = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
  add("Tool", about ? `${asked.toolName} · ${about.description}` : asked.toolName);
  add("Cost", `at most ${counted(asked.estimatedCredits)}; calls over ${counted(asked.threshold)} need your approval`);
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

/** A run that waits for credits goes on by itself once they have come. */
function outOfCredits(card, title, asked, answer) {
  const isBudget = asked.reason === "BUDGET_EXCEEDED";
  title.textContent = isBudget ? "The run's budget is used up" : "Not enough credits";
  const left = isBudget ? "are left of the budget" : "are available";
  const step = asked.toolName === "model" ? "The next step" : `The call of ${asked.toolName}`;
  card.append(make("p", "", `${step} can cost up to ${counted(asked.estimatedCredits)}; ${counted(asked.threshold)} ${left}.`));
  if (!isBudget) card.append(make("p", "", "The run continues by itself once there are enough."));
  const row = make("div", "row");
  const stop = button("End the run", "", () => answer({ approved: false }));
  if (isBudget) {
    const budget = make("input");
    budget.type = "number";
    budget.min = 0;
    budget.step = "any";
    row.append(
      make("label", "", "Higher budget", budget),
      button("Continue", "primary", () => answer({ approved: true, maxCredits: Number(budget.value) })));
  } else if (asked.topUpUrl) {
    const link = make("a", "", "Buy credits");
    Object.assign(link, { href: asked.topUpUrl, target: "_blank", rel: "noopener" });
    row.append(link);
  }
  row.append(stop);
  card.append(row);
}

function clarification(card, title, asked, answer) {
  title.textContent = asked.question;
  if (asked.options?.length) {
    card.append(make("div", "row", ...asked.options.map((option) => button(option, "", () => answer({ answer: option })))));
  }
  const input = make("input");
  input.required = true;
  input.maxLength = 10000;
  const form = make("form", "row", make("label", "", "Your answer, here or in the message box", input), make("button", "primary", "Answer"));
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
    if (asked.reason) {
      const step = asked.toolName === "model" ? "the next step" : asked.toolName;
      const by = given?.by ? ` (${given.by})` : "";
      if (!given) return `No credits came for ${step}.`;
      return given.approved ? `Continued with ${step}${by}.` : `Ended before ${step}.`;
    }
    const what = `${asked.toolName} for up to ${counted(asked.estimatedCredits)}`;
    if (!given) return `No one decided about ${what}.`;
    const why = given.reason ? `: ${given.reason}` : "";
    return `${given.approved ? "Approved" : "Refused"}: ${what}${why}`;
  }
  if (!given) return `${asked.question} — not answered.`;
  return `${asked.question} — ${given.declined ? "declined" : given.data ? JSON.stringify(given.data) : given.answer}`;
}

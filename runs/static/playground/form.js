/** A form for the data that a tool's server asks for: a field for each property of a flat schema, else JSON as text. */

import { button, make } from "./dom.js";

const TYPES = { string: "text", number: "number", integer: "number", boolean: "checkbox" };

/** Calls `answer` with `{data}` or `{declined: true}`. */
export function schemaForm(schema, answer) {
  const properties = Object.entries(schema?.properties ?? {});
  const required = new Set(Array.isArray(schema?.required) ? schema.required : []);
  const fields = properties.map(([name, about]) => field(name, about, required.has(name)));
  const flat = properties.length > 0 && fields.every(Boolean);
  const whole = make("textarea");
  whole.value = "{}";
  const rows = flat ? fields.map(({ label }) => label) : [make("label", "", "Data, as JSON", whole)];
  const form = make("form", "", ...rows, make("div", "row",
    make("button", "primary", "Send"), button("Decline", "", () => answer({ declined: true }))));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (flat) {
      const given = fields.map(({ name, read }) => [name, read()]).filter(([, value]) => value !== undefined);
      answer({ data: Object.fromEntries(given) });
      return;
    }
    whole.setCustomValidity("");
    try {
      answer({ data: JSON.parse(whole.value) });
    } catch (error) {
      whole.setCustomValidity(error.message);
      whole.reportValidity();
    }
  });
  return form;
}

/** The field of a property; null for one that is not a text, a number, a yes or no, or a choice. */
function field(name, about, isRequired) {
  const choices = about?.enum?.map((value) => [value, value]) ?? about?.oneOf?.map((one) => [one?.const, one?.title]);
  const input = make(choices ? "select" : "input");
  let read = () => (input.value === "" && !isRequired ? undefined : input.value);
  if (choices) {
    if (choices.some(([value]) => typeof value !== "string")) return null;
    if (!isRequired) input.append(new Option("", ""));
    input.append(...choices.map(([value, title]) => new Option(title ?? value, value)));
  } else if (!TYPES[about?.type]) {
    return null;
  } else {
    input.type = TYPES[about.type];
    if (input.type === "number") {
      input.step = about.type === "integer" ? 1 : "any";
      read = () => (input.value === "" ? undefined : Number(input.value));
    }
  }
  if (input.type === "checkbox") {
    input.checked = about.default === true;
    read = () => input.checked;
  } else {
    input.required = isRequired;
    if (about.default !== undefined) input.value = about.default;
  }
  return { name, read, label: make("label", "", about.title ?? name, input, ...(about.description ? [make("small", "", about.description)] : [])) };
}

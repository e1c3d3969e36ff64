/** Requests to the REST API. Holds the credential; knows nothing of the page. */

export const session = { credential: sessionStorage.getItem("credential") || "" };

export const isPublic = () => session.credential.startsWith("awk_");
export const surface = () => (isPublic() ? "/api/public/v1" : "/api/v1");
export const headers = () => ({ Authorization: `Bearer ${session.credential}` });

export function keep(credential) {
  session.credential = credential;
  if (credential) sessionStorage.setItem("credential", credential);
  else sessionStorage.removeItem("credential");
}

export class Refused extends Error {
  constructor(status, error) {
    const fields = Object.entries(error?.details?.fields || {}).map(([name, texts]) => `${name}: ${texts.join(" ")}`);
    super(fields.join(" ") || error?.message || `The service answered ${status}.`);
    this.status = status;
  }
}

async function request(path, options) {
  const answer = await fetch(path, options).catch(() => {
    throw new Refused(0, { message: "The service can't be reached." });
  });
  if (answer.ok) return answer;
  throw new Refused(answer.status, (await answer.json().catch(() => null))?.error);
}

/** The JSON of the answer, or null if it has none. Raises Refused. */
export async function call(method, path, body) {
  const type = body ? { "Content-Type": "application/json" } : {};
  const answer = await request(surface() + path, {
    method, headers: { ...headers(), ...type }, body: body ? JSON.stringify(body) : undefined,
  });
  return answer.status === 204 ? null : answer.json();
}

/** All items of a list of the catalogue. */
export async function all(path) {
  const items = [];
  let cursor = null;
  do {
    const page = await call("GET", `${path}?limit=100${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`);
    items.push(...page.items);
    cursor = page.nextCursor;
  } while (cursor);
  return items;
}

/** Uploads a file in the three steps of docs/attachments.md; the attachment that a message can use. */
export async function upload(file) {
  const attachment = await call("POST", "/attachments", {
    fileName: file.name, contentType: typeOf(file), sizeBytes: file.size,
  });
  const { url, method, headers: required } = attachment.upload;
  const { pathname } = new URL(url);
  // The service's own address as a path, because the page may be open under another host name.
  const target = /^\/uploads\/[^/]+$/.test(pathname) ? pathname : url;
  await request(target, { method, headers: required, body: file });
  return call("POST", `/attachments/${attachment.id}/complete`, {});
}

// Browsers know no type for these endings.
const TYPES = { md: "text/markdown", csv: "text/csv", json: "application/json", log: "text/plain", txt: "text/plain" };

export const typeOf = (file) =>
  file.type.split(";")[0] || TYPES[file.name.split(".").pop().toLowerCase()] || "application/octet-stream";

/** The options of the runs that this tab has started. The API does not show all of them. */

const KEY = "options";
const RUNS_MAX = 100;

const kept = () => JSON.parse(sessionStorage.getItem(KEY) || "{}");

export function remember(runId, { message, ...options }) {
  const newest = Object.entries(kept()).slice(1 - RUNS_MAX);
  try {
    sessionStorage.setItem(KEY, JSON.stringify(Object.fromEntries([...newest, [runId, options]])));
  } catch { // the browser's storage is full
    forget();
  }
}

/** The options as they were sent; null for a run that another tab or client has started. */
export const optionsOf = (runId) => kept()[runId] || null;

export const forget = () => sessionStorage.removeItem(KEY);

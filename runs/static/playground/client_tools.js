/** A tool that this page executes, as an app executes its own. A run has it if its message names it. */

import { call } from "./api.js";
import { notice } from "./dom.js";

const BROWSER_INFO = {
  name: "browser_info",
  description: "The time, time zone, language and window size of the user's browser.",
  inputSchema: { type: "object", properties: {} },
};

export const clientTools = (message) => (message.includes(BROWSER_INFO.name) ? { clientTools: [BROWSER_INFO] } : {});

/** `data` is the data of tool.started. A call that another tab has answered keeps that answer. */
export async function execute(data, card) {
  if (data.awaiting !== "client" || data.name !== BROWSER_INFO.name) return;
  const result = {
    time: new Date().toString(),
    timeZone: Intl.DateTimeFormat().resolvedOptions().timeZone,
    language: navigator.language,
    window: [innerWidth, innerHeight],
  };
  try {
    await call("POST", `/tool-invocations/${data.toolInvocationId}/result`, { result });
  } catch (error) {
    notice(error.message, card);
  }
}

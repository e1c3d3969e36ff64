// Django's selector gives its tooltips a label but no role, and a label without a role is not read out.
window.addEventListener("load", () => setTimeout(() => {
  for (const tip of document.querySelectorAll("span.help-tooltip[aria-label]")) tip.setAttribute("role", "img");
}));

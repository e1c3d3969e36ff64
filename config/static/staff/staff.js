// Buttons that copy an id. Without a secure context browsers have no clipboard; the old command then copies.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  event.preventDefault();
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = "check";
  setTimeout(() => { button.textContent = "content_copy"; }, 2000);
});

// Django's selector gives its tooltips a label but no role, and a label without a role is not read out.
window.addEventListener("load", () => setTimeout(() => {
  for (const tip of document.querySelectorAll("span.help-tooltip[aria-label]")) tip.setAttribute("role", "img");
}));

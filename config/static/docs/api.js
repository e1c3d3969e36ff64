// What Swagger UI leaves out for screen readers: the language of the page, and names of choices.
document.documentElement.lang = "en";
new MutationObserver(() => {
  for (const select of document.querySelectorAll("select:not([aria-label])"))
    select.setAttribute("aria-label", select.id || select.closest("tr")?.dataset.paramName || "Choice");
}).observe(document.getElementById("swagger-ui"), { childList: true, subtree: true });

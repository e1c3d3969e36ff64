// The options of Swagger UI. Under an operation it shows the request that was tried, in curl, Python and JavaScript.
const parts = (request) => ({
  url: request.get("url"),
  method: request.get("method") || "GET",
  headers: request.get("headers")?.toJS() ?? {},
  body: request.get("body"),
});

function python(request) {
  const { url, method, headers, body } = parts(request);
  const given = [JSON.stringify(method), JSON.stringify(url), `headers=${JSON.stringify(headers)}`];
  if (typeof body === "string") given.push(`data=${JSON.stringify(body)}.encode()`);
  return `import requests\n\nanswer = requests.request(\n    ${given.join(",\n    ")},\n)\nprint(answer.status_code, answer.text)`;
}

function javascript(request) {
  const { url, method, headers, body } = parts(request);
  const options = { method, headers, ...(typeof body === "string" ? { body } : {}) };
  return `const answer = await fetch(${JSON.stringify(url)}, ${JSON.stringify(options, null, 2)});\nconsole.log(answer.status, await answer.text());`;
}

// A function, because the page loads Swagger UI after this file.
window.swaggerOptions = () => ({
  // The layout with the choice of documents and the dark mode needs a preset.
  layout: "StandaloneLayout",
  presets: [SwaggerUIBundle.presets.apis, SwaggerUIStandalonePreset],
  urls: [
    { name: "Session surface: /api/v1, session tokens", url: "/api/schema/session?format=json" },
    { name: "Public surface: /api/public/v1, API keys", url: "/api/schema/public?format=json" },
    { name: "Both surfaces, and callbacks of tools", url: "/api/schema?format=json" },
  ],
  plugins: [() => ({ fn: { requestSnippetGenerator_python: python, requestSnippetGenerator_javascript: javascript } })],
  requestSnippetsEnabled: true,
  requestSnippets: {
    defaultExpanded: true,
    languages: ["curl_bash", "python", "javascript"],
    generators: {
      curl_bash: { title: "curl", syntax: "bash" },
      python: { title: "Python", syntax: "python" },
      javascript: { title: "JavaScript", syntax: "javascript" },
    },
  },
  defaultModelsExpandDepth: 0,
  persistAuthorization: false,
});

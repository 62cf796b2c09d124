"use strict";

const find = (id) => document.getElementById(id);
let decision = null;

async function send(method, path, body) {
  const headers = { "Content-Type": "application/json" };
  const key = find("key").value;
  if (key) headers.Authorization = `Bearer ${key}`;
  const began = performance.now();
  const response = await fetch(path, { method, headers, body: JSON.stringify(body) });
  const answer = await response.json();
  note(`${method} ${path}`, body, response.status, performance.now() - began, answer);
  return response.ok ? answer : null;
}

function note(request, body, status, milliseconds, answer) {
  const item = document.createElement("li");
  const title = document.createElement("div");
  title.textContent = `${request} → ${status} in ${milliseconds.toFixed(1)} ms`;
  const text = document.createElement("pre");
  text.textContent = `${JSON.stringify(body)}\n${JSON.stringify(answer, null, 2)}`;
  item.append(title, text);
  find("requests").prepend(item);
}

function show(answer) {
  decision = answer && !answer.ended && answer.arm !== null ? answer : null;
  find("ad").hidden = answer === null;
  if (answer === null) return;
  find("arm").textContent = decision ? decision.arm : answer.ended ? `The session has ended: ${answer.ended}.` : "No ad.";
  find("about").textContent = decision
    ? `Position ${decision.position}, ${decision.mode}, expected revenue from here on ${decision.value.toPrecision(3)}.`
    : "";
  for (const id of ["clicked", "passed"]) find(id).disabled = decision === null;
}

async function report(clicked) {
  const { session_id: session, position, arm, tokens } = decision;
  const body = { position, arm, clicked };
  if (tokens) body.token = tokens[0];
  const answer = await send("POST", `/v1/sessions/${encodeURIComponent(session)}/feedback`, body);
  if (answer !== null) show(answer);
}

/** Fill in a context as this server takes it; with API keys, once there is one. */
async function prefill() {
  const key = find("key").value;
  const answer = await fetch("/v1/example.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (answer.ok && !find("context").value) find("context").value = JSON.stringify(await answer.json(), null, 1).replace(/\s+/g, " ");
}

prefill();
find("key").addEventListener("change", prefill);
find("arrive").addEventListener("submit", async (event) => {
  event.preventDefault();
  let context;
  try {
    context = JSON.parse(find("context").value);
  } catch (error) {
    note("The context is not JSON", find("context").value, "nothing sent", 0, String(error));
    return;
  }
  const body = { context };
  const excluded = find("exclude").value.split(",").map((arm) => arm.trim()).filter(Boolean);
  if (find("session").value) body.session_id = find("session").value;
  if (find("user").value) body.user_id = find("user").value;
  if (excluded.length) body.exclude = excluded;
  show(await send("POST", "/v1/sessions", body));
});
find("clicked").addEventListener("click", () => report(true));
find("passed").addEventListener("click", () => report(false));

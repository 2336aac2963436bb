// The server's routes. The key, where one is needed, lives in this tab's memory and nowhere else.
let key = "";
const ROOT = new URL("..", import.meta.url).pathname.slice(0, -1); // "" or where the server's routes are mounted

export class ServerError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function send(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["content-type"] = "application/json";
  const answer = await fetch(ROOT + path, {
    method: body === undefined ? "GET" : "POST", headers, signal,
    body: body === undefined ? undefined : JSON.stringify(body), credentials: "omit", cache: "no-store",
  });
  if (answer.ok) return answer;
  const problem = await answer.json().catch(() => ({}));
  throw new ServerError(answer.status, problem.error?.message ?? `the server answered with status ${answer.status}`);
}

export const json = async (path, body, signal) => (await send(path, body, signal)).json();

// The chunks of a streamed completion, as they come.
export async function* chunks(body, signal) {
  const answer = await send("/v1/chat/completions", { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(502, "the connection was closed before the answer was complete");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue; // a comment, which keeps a waiting connection open
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      yield chunk;
    }
  }
}

// Asks for the key once the server wants one, and then does again what could not be done.
class KeyForm extends HTMLElement {
  ask() {
    return new Promise((resolve) => {
      const form = element("form", { className: "card" }, [
        element("label", { htmlFor: "key", textContent: "This server takes an API key" }),
        element("input", { id: "key", type: "password", autocomplete: "off", required: true }),
        element("p", { className: "note", textContent: "It stays in this tab, and is forgotten when the tab is closed." }),
        element("button", { type: "submit", textContent: "Use this key" }),
      ]);
      form.addEventListener("submit", (event) => {
        event.preventDefault();
        key = form.querySelector("input").value.trim();
        this.replaceChildren();
        resolve();
      });
      this.replaceChildren(form);
      form.querySelector("input").focus();
    });
  }
}
customElements.define("key-form", KeyForm);

export async function withKey(work) {
  for (;;) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 401) throw error;
      await document.querySelector("key-form").ask();
    }
  }
}

export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

export const percent = (share) => share === null || share === undefined ? "–" : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
export const number = (value) => value === null || value === undefined ? "–" : Number(value.toPrecision(3)).toString();
export const ACTIONS = { answer: "Let through", escalate: "Escalated", abstain: "Withheld" };
const FLAGGED = { escalate: "Delivered (advice: escalate)", abstain: "Delivered (advice: withhold)" };
// What became of an answer: where nothing is enforced, its action is advice, and it was delivered.
export const delivery = ({ action, enforced }) => enforced ? action : "answer";
// Some sentences of the answer went out, and others did not.
const isPart = (verdict) => {
  const shown = (verdict.sentences ?? []).map(({ action }) => action === "deliver");
  return verdict.partly_withheld ?? (verdict.enforced && verdict.action === "answer" && shown.includes(true) && shown.includes(false));
};
export const outcome = (verdict) => isPart(verdict) ? { label: "Partly withheld", className: "escalate" } : {
  label: verdict.enforced ? ACTIONS[verdict.action] : FLAGGED[verdict.action] ?? ACTIONS.answer,
  className: verdict.enforced || verdict.action === "answer" ? verdict.action : "flagged",
};

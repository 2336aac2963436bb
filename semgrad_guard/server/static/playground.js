import { chunks, delivery, element, json, number, outcome, percent, withKey } from "./api.js";

const $ = (name) => document.querySelector(name);
const READING = "The library in Halden has two floors. Its roof was painted green in 1998. It opens at nine.";
const EXAMPLES = [["What is the capital of Japan?"], ["What is the capital of Mongolia?"], ["What colour is the roof of the library?", READING]];
const FATES = {
  deliver: "Let through", drop: "Doubtful: left out", stop: "Doubtful: the answer ends before it",
};
const HEAT = [0.1, 0.3, 0.6, 0.85]; // of 1 - a token's probability: where a shade begins

class GuardAnswer extends HTMLElement {
  show({ question, text, before = null, thought = "", verdict, tokens = [], sentences: scored = null, cut = false, stopped = false }, { focus = false } = {}) {
    const sentences = verdict?.sentences?.length ? verdict.sentences : scored;
    this.answer = { text, verdict, tokens, sentences };
    this.hidden = false;
    const { label, className } = verdict ? outcome(verdict) : { label: stopped ? "Stopped: there is no verdict" : "Answering …", className: "" };
    const title = element("p", { className: `verdict ${className}`, textContent: label });
    if (focus) title.tabIndex = -1;
    this.detail = element("p", { className: "note", role: "status" });
    this.body = element("p", { className: "text" });
    this.legend = element("p", { className: "note" });
    const parts = [element("h2", { textContent: "Answer" }), ...turns(before), turn("You", question), title, ...(thought ? [this.folded(thought)] : []), this.body];
    const views = [["text", "Text"], ...(sentences ? [["sentences", "By sentence"]] : []), ...(tokens.length ? [["tokens", "By token"]] : [])];
    if (views.length > 1) parts.push(this.switches(views), this.legend, this.detail);
    if (cut) parts.push(element("p", { className: "note", textContent: "The answer was cut off at the longest length." }));
    if (verdict) parts.push(...words(verdict));
    this.replaceChildren(...parts);
    this.view(sentences?.some(({ action }) => action) ? "sentences" : tokens.length ? "tokens" : "text");
    if (focus) title.focus();
  }

  // Opened once, it stays open while the answer grows.
  folded(thought) {
    this.fold = element("details", { open: this.fold?.open ?? false }, [
      element("summary", { textContent: "Reasoning" }), element("p", { className: "note text", textContent: thought }),
    ]);
    return this.fold;
  }

  switches(views) {
    const row = element("div", { className: "row", role: "group", ariaLabel: "Colour the answer" });
    for (const [name, label] of views) {
      const button = element("button", { type: "button", className: "plain", textContent: label });
      button.dataset.view = name;
      button.addEventListener("click", () => this.view(name));
      row.append(button);
    }
    return row;
  }

  view(name) {
    for (const button of this.querySelectorAll("[data-view]")) button.ariaPressed = String(button.dataset.view === name);
    const { text, tokens, sentences, verdict } = this.answer;
    if (this.detail) this.detail.textContent = "";
    if (name === "tokens") this.heat(tokens.map(asPiece), "Stronger colour: the model was less sure of this token.");
    else if (name === "sentences") this.heat(pieces(text, sentences, verdict ?? {}), "Stronger colour: less certain than the answer's other sentences.");
    else { this.body.textContent = text; this.legend.textContent = ""; }
  }

  // Spans that are reached with Tab once, and from there with the arrow keys.
  heat(found, legend) {
    const spans = found.map(({ text, shade, detail, doubtful = false }) => {
      const span = element("span", { textContent: text, tabIndex: -1, className: `${shade ? `heat-${shade}` : ""}${doubtful ? " doubt" : ""}` });
      for (const event of ["mouseenter", "focus"]) span.addEventListener(event, () => { this.detail.textContent = detail; });
      return span;
    });
    if (spans.length) spans[0].tabIndex = 0;
    this.body.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const next = spans[spans.indexOf(document.activeElement) + step];
      if (!step || !next) return;
      event.preventDefault();
      for (const span of spans) span.tabIndex = span === next ? 0 : -1;
      next.focus();
    };
    this.body.replaceChildren(...spans);
    const scale = [1, 2, 3, 4].map((shade) => element("span", { className: `swatch heat-${shade}`, ariaHidden: "true", textContent: " " }));
    this.legend.replaceChildren(...scale, ` ${legend} Arrow keys go from one to the next.`);
  }
}
customElements.define("guard-answer", GuardAnswer);

function asPiece({ token, logprob, top_logprobs: others = [] }) {
  const chance = Math.exp(logprob);
  const instead = others.filter((other) => other.token !== token).map((other) => `“${other.token}” ${percent(Math.exp(other.logprob))}`);
  const detail = `“${token}” had ${percent(chance)}${instead.length ? `; instead: ${instead.join(", ")}` : ""}`;
  return { text: token, shade: HEAT.filter((edge) => 1 - chance >= edge).length, detail };
}

// Places in a text are counted in characters, of which some are two units of a JavaScript string.
function pieces(text, sentences, { enforced = true }) {
  const known = sentences.map((sentence) => sentence.uncertainty).filter((value) => value !== null);
  const low = Math.min(...known), width = Math.max(...known) - low, points = Array.from(text);
  const found = [], plain = (start, end) => found.push({ text: points.slice(start, end).join(""), shade: 0, detail: "" });
  let end = 0;
  for (const { start, end: next, uncertainty, action = null } of sentences) {
    const doubtful = action !== null && action !== "deliver";
    const fate = action === null ? "" : doubtful && !enforced ? ` Doubtful: advice is ${action}.` : ` ${FATES[action]}.`;
    if (start > end) plain(end, start);
    const detail = start === next ? fate : `Uncertainty of this sentence: ${number(uncertainty)}${fate && `.${fate}`}`;
    const shade = uncertainty === null || !width ? 0 : Math.round(4 * (uncertainty - low) / width);
    if (start < next) found.push({ text: points.slice(start, next).join(""), shade, detail, doubtful });
    else if (found.at(-1)?.detail !== detail) found.push({ text: "[…] ", shade: 0, detail, doubtful });
    end = Math.max(end, next);
  }
  plain(end);
  return found.filter((span) => span.text);
}

const turn = (name, text) => element("p", { className: "turn" }, [element("strong", { textContent: `${name}: ` }), text]);

function turns(one) {
  return one ? [...turns(one.before), turn("You", one.question), turn(one.verdict ? `Answer (${outcome(one.verdict).label.toLowerCase()})` : "Answer (stopped)", one.text)] : [];
}

function conversation(one) {
  return one ? [...conversation(one.before), { role: "user", content: one.content }, ...(one.text ? [{ role: "assistant", content: one.text }] : [])] : [];
}

function words(verdict) {
  const sure = verdict.confidence == null ? "" : `About ${percent(verdict.confidence)} of answers like this one are right.`;
  const held = delivery(verdict) !== "answer" ? " The model's text is not shown." : "";
  const promise = verdict.promised ? "Yes" : `No${verdict.unfamiliar?.length ? `: ${verdict.unfamiliar.join("; ")}` : ""}`;
  const facts = [
    ["Uncertainty", number(verdict.uncertainty)], ["Threshold", number(verdict.threshold)], ["Under the promise", promise],
    ["Estimator", verdict.estimator], ...(verdict.reason ? [["Reason", verdict.reason]] : []),
    ...(verdict.decision_id ? [["Decision", verdict.decision_id]] : []),
  ];
  return [
    element("p", { textContent: `${sure}${held}` }),
    element("dl", {}, facts.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })])),
  ];
}

const models = new Map();
const answered = [];
let running = null, shownLast = null;

async function begin() {
  const found = await withKey(() => json("/v1/models"));
  for (const model of found.data) {
    models.set(model.id, model.semgrad_guard);
    $("#model").append(element("option", { value: model.id, textContent: model.id }));
  }
  choose();
}

function choose() {
  const guard = models.get($("#model").value);
  const compared = guard.threshold === null ? "" : ` Threshold: ${number(guard.threshold)}.`;
  $("#promise").textContent = (guard.report?.promise ?? "This model has no calibration, so nothing is promised.") + compared;
}

async function ask(question, passage, system) {
  const model = $("#model").value, guard = models.get(model);
  const content = passage ? guard.reading_prompt.replace(/\{(question|context)\}/g, (_, name) => name === "question" ? question : passage) : question;
  const before = $("#follow").checked ? shownLast : null;
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...conversation(before), { role: "user", content }];
  const more = guard.written_by === "engine" ? { logprobs: true, top_logprobs: 3 } : {};
  running = new AbortController();
  const shown = { question, content, before, text: "", thought: "", verdict: null, tokens: [], sentences: null, cut: false, stopped: false };
  if (["enforce", "raise"].includes(guard.mode)) say("The answer is held until it is judged …");
  try {
    await receive({ model, messages, ...more }, shown);
  } catch (error) {
    shown.stopped = true;
    if (shown.text || shown.thought) { remember(shown); show(shown); } // delivered text stays
    else if (shownLast) show(shownLast);
    else $("guard-answer").hidden = true;
    throw error;
  }
  if (guard.scores_texts && shown.verdict && !shown.verdict.sentences?.length && delivery(shown.verdict) === "answer" && /[.!?]\s+\S/.test(shown.text)) {
    shown.sentences = (await json("/v1/score", { model, messages, text: shown.text, by: "sentence" }, running.signal)).segments;
  }
  return shown;
}

async function receive(body, shown) {
  for await (const chunk of chunks(body, running.signal)) {
    const choice = chunk.choices[0];
    if (!choice) continue;
    shown.text += choice.delta.content ?? choice.delta.refusal ?? "";
    shown.thought += choice.delta.reasoning_content ?? "";
    for (const { function: called } of choice.delta.tool_calls ?? []) shown.text += `${called.name}(${called.arguments})`;
    shown.cut ||= choice.finish_reason === "length";
    if (choice.logprobs?.content) shown.tokens.push(...choice.logprobs.content);
    if (chunk.semgrad_guard_sentence) shown.sentences = [...(shown.sentences ?? []), chunk.semgrad_guard_sentence];
    if (choice.logprobs?.semgrad_guard) shown.verdict = { ...choice.logprobs.semgrad_guard.details, ...choice.logprobs.semgrad_guard };
    if (shown.text || shown.thought) say("Answering …");
    $("guard-answer").show(shown);
  }
}

function show(one) {
  shownLast = one;
  $("#follow-up").hidden = false;
  $("#examples").hidden = true;
  $("guard-answer").show(one, { focus: true });
}

function remember(one) {
  answered.unshift(one);
  $("#history").hidden = false;
  $("#history ol").replaceChildren(...answered.slice(0, 50).map((past) => {
    const again = element("button", { type: "button", textContent: `${past.question} – ${past.verdict ? outcome(past.verdict).label.toLowerCase() : "stopped"}` });
    again.addEventListener("click", () => show(past));
    return element("li", {}, [again]);
  }));
}

// The seconds are for the eyes: a status that is read out each second would drown everything else.
function wait() {
  const began = Date.now(), tick = () => { $("#progress span").textContent = `${Math.round((Date.now() - began) / 1000)} s`; };
  tick();
  $("#progress").hidden = false;
  const timer = setInterval(tick, 1000);
  return () => { clearInterval(timer); $("#progress").hidden = true; };
}

function say(text, isError = false) {
  if ($("#status").textContent !== text) $("#status").textContent = text;
  $("#status").classList.toggle("error", isError);
}

$("#ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const submit = $("#ask button[type=submit]");
  if (submit.disabled) return; // Enter asks too
  submit.disabled = true;
  $("#stop").hidden = false;
  say("Answering …");
  const done = wait();
  try {
    const one = await withKey(() => ask(...["question", "passage", "system"].map((name) => $(`#${name}`).value.trim())));
    remember(one);
    show(one);
    if ($("#follow").checked) $("#question").value = "";
    say("");
  } catch (error) {
    say(error.name === "AbortError" ? "Stopped." : error.message, error.name !== "AbortError");
  } finally {
    done();
    submit.disabled = false;
    $("#stop").hidden = true;
  }
});
$("#question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("#ask").requestSubmit(); }
});
$("#examples").append("Try: ", ...EXAMPLES.map(([question, passage = ""]) => {
  const button = element("button", { type: "button", className: "plain", textContent: passage ? `${question} (from a passage)` : question });
  button.addEventListener("click", () => {
    $("#question").value = question;
    $("#passage").value = passage;
    $("#passage").closest("details").open = Boolean(passage);
    $("#ask").requestSubmit();
  });
  return button;
}));
$("#stop").addEventListener("click", () => running?.abort());
$("#model").addEventListener("change", choose);
begin().catch((error) => say(error.message, true));

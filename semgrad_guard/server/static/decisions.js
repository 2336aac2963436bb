import { element, json, number, outcome, percent, withKey } from "./api.js";

const $ = (name) => document.querySelector(name);
const COLUMNS = ["Time", "Outcome", "Uncertainty", "Threshold", "P(correct)", "Promised", "Took", "Model", "Why", "Right?"];
let last = null;

const cell = (text, className = "") => element("td", { textContent: text, className, role: "cell" });
const head = (names) => element("thead", { role: "rowgroup" }, [element("tr", { role: "row" }, names.map((name) => element("th", { scope: "col", role: "columnheader", textContent: name })))]);

// A row whose cells know their columns' names: small screens show them beside the values. The roles stay there, too.
function line(names, cells) {
  cells.forEach((cell, column) => { if (cell.tagName === "TD") cell.dataset.label = names[column]; });
  return element("tr", { role: "row" }, cells);
}

function svg(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

const STATES = { kept: "answer", unknown: "escalate", broken: "abstain" };

// The interval of the error rate, and the promised rate as a line across it.
function interval({ low, high, alpha, state }) {
  const label = `Error rate between ${percent(low)} and ${percent(high)}; promised: at most ${percent(alpha)}`;
  const made = svg("svg", { class: "interval", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label });
  const scale = 100 / Math.min(1, Math.max(4 * alpha, 1.2 * low));
  made.append(svg("rect", { class: "whole", x: 0, y: 4, width: 100, height: 2 }));
  made.append(svg("rect", { class: STATES[state], x: scale * low, y: 2, width: Math.max(0.5, scale * (Math.min(high, 1) - low)), height: 6 }));
  made.append(svg("rect", { class: "promised", x: scale * alpha - 0.2, y: 0, width: 0.4, height: 10 }));
  return made;
}

async function promises() {
  const { data } = await json("/v1/promises");
  const shown = data.map((promise) => element("article", {}, [
    element("p", { className: `verdict ${STATES[promise.state]}`, textContent: promise.state === "unknown" ? "Not known yet" : promise.state === "kept" ? "Kept" : "Broken" }),
    element("p", { textContent: promise.words.replace(/^\w+: (.)/, (_, first) => first.toUpperCase()) }),
    interval(promise),
    element("p", { className: "note", textContent: `Calibration ${promise.calibration_id}${promise.current ? ", which decides now" : ", which decides no longer"}. The bar is the range of the error rate, the line the promised ${percent(promise.alpha)}.` }),
  ]));
  $("#promises div").replaceChildren(...(shown.length ? shown : [element("p", { textContent: "No calibration has promised anything here, so there is no promise to watch." })]));
  $("#promises").hidden = false;
}

async function savings() {
  const { words } = await json(`/v1/savings?since=${$("#since").value}`);
  $("#savings div").replaceChildren(...words.map((textContent) => element("p", { textContent })));
  $("#savings").hidden = !words.length;
}

const query = (more = {}) => new URLSearchParams({ since: $("#since").value, ...($("#action").value && { action: $("#action").value }), ...more });

// People grade what they can read: a log without texts has a sheet for it (semgrad-guard sample).
function graded(decision) {
  const made = cell("", "");
  const show = (feedback) => made.replaceChildren(`${feedback.right ? "Right" : "Wrong"}${feedback.sampling === "random" ? " (drawn)" : ""}`);
  if (decision.feedback) { show(decision.feedback); return made; }
  if (decision.delivery === "abstain" || !decision.question || !decision.delivered) { made.textContent = "–"; return made; }
  for (const [label, right] of [["Right", true], ["Wrong", false]]) {
    const button = element("button", { type: "button", className: "plain", textContent: label, ariaLabel: `${label}: ${decision.id}` });
    button.addEventListener("click", async () => {
      try {
        const given = await withKey(() => json("/v1/feedback", { decision_id: decision.id, right }));
        show(given);
        say(given.note ? `Kept: ${given.note}.` : "Kept: it counts for the promise.");
        await promises();
      } catch (error) { say(error.message, true); }
    });
    made.append(button);
  }
  return made;
}

function row(decision) {
  const { label, className } = outcome(decision), at = new Date(decision.at);
  const shown = decision.question ? `${decision.question} → ${decision.delivered ?? "withheld"}` : decision.reason ?? "–";
  return line(COLUMNS, [
    element("td", { role: "cell" }, [element("time", { dateTime: decision.at, textContent: at.toLocaleString() })]),
    cell(label, className), cell(number(decision.uncertainty), "number"), cell(number(decision.threshold), "number"),
    cell(percent(decision.confidence), "number"), cell(decision.promised ? "yes" : "no"), cell(decision.seconds === null ? "–" : `${number(decision.seconds)} s`, "number"),
    cell(decision.served ?? decision.model), cell(shown, "reason"), graded(decision),
  ]);
}

async function list(after) {
  const found = await json(`/v1/decisions?${query({ limit: 50, ...(after && { after }) })}`);
  const table = $("#list table");
  if (!after) table.replaceChildren(head(COLUMNS), element("tbody", { role: "rowgroup" }));
  table.querySelector("tbody").append(...found.data.map(row));
  last = found.data.at(-1)?.id ?? last;
  $("#more").hidden = !found.has_more;
  $("#list").hidden = false;
  if (!after && !found.data.length) say("No decision in this time.");
}

function say(text, isError = false) {
  $("#status").textContent = text;
  $("#status").classList.toggle("error", isError);
}

async function show() {
  say("");
  try {
    await withKey(promises);
    await withKey(savings);
    await withKey(() => list(null));
  } catch (error) { say(error.message, true); }
}

$("#filter").addEventListener("submit", (event) => { event.preventDefault(); show(); });
$("#more").addEventListener("click", () => withKey(() => list(last)).catch((error) => say(error.message, true)));
show();

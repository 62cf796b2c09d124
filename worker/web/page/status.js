// Poll status.json once a second and show it.

import { LineChart, make, smooth } from "./charts.js";

const INTERVAL = 1000; // milliseconds between two requests
const TIMEOUT = 5000; // milliseconds
const MOST_SAMPLES = 90; // points of the traffic line

const $ = (id) => document.getElementById(id);
const number = (digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits });
const whole = number(0);
const dash = (show) => (value) => (typeof value === "number" && Number.isFinite(value) ? show(value) : "–");
const count = dash((value) => whole.format(value));
const percent = dash((value) => `${(value * 100).toFixed(Math.abs(value) < 0.00995 ? 2 : 1)} %`);
const axisPercent = dash((value) => `${number(1).format(value * 100)} %`);
const short = dash((value) => (value === 0 ? "0" : Math.abs(value) >= 100 ? whole.format(value) : String(Number(value.toPrecision(Math.abs(value) < 1e-4 ? 2 : 3)))));
const brief = dash((value) => (Math.abs(value) >= 1e6 ? `${number(1).format(value / 1e6)} M` : Math.abs(value) >= 1e4 ? `${number(1).format(value / 1e3)} k` : count(value)));
const ratio = dash((value) => value.toFixed(2));
const share = (part, of) => (of ? part / of : null);

/** Return time labels, with seconds only where needed. */
function clocks(times) {
  const close = times.some((time, index) => index && time - times[index - 1] < 60_000);
  return times.map((time) => new Date(time).toISOString().slice(11, close ? 19 : 16));
}

function seconds(value) {
  if (typeof value !== "number") return "–";
  return value < 0.001 ? `${Math.round(value * 1e6)} µs` : value < 1 ? `${number(1).format(value * 1e3)} ms` : `${number(1).format(value)} s`;
}

function span(milliseconds) {
  if (typeof milliseconds !== "number") return "–";
  const all = Math.round(milliseconds / 1000);
  const [days, hours, minutes] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes >= 10) return `${minutes} min`;
  return minutes ? `${minutes} min ${all % 60} s` : `${all} s`;
}

function setText(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

const charts = {
  regret: new LineChart($("chart-regret"), { name: "Regret per session", format: short, log: true }),
  revenue: new LineChart($("chart-revenue"), { name: "Revenue per window", format: short }),
  explore: new LineChart($("chart-explore"), { name: "Share of positions that explored", format: axisPercent }),
};

// ── parts ───────────────────────────────────────────────────────────────────────────────────────────────────────────

function problem(one) {
  if (!one.kind) return make("li", { "data-level": one.level }, one.text);
  return make("li", { "data-level": one.level }, make("span", { class: "kind" }, one.kind), make("strong", {}, one.text),
    make("p", { class: "detail", "aria-live": "off" }), make("p", {}, make("b", {}, "To do: "), one.do));
}

function showState(status) {
  const worst = status.problems[0]?.level;
  const texts = { bad: "Needs attention", warn: "Serving, with warnings" };
  $("pill").dataset.level = worst ?? "good";
  setText("pill-text", texts[worst] ?? "Serving");
  setText("what", [status.runner, status.simulated ? "simulated users" : null, status.parameters && `${status.parameters.model} model`, status.parameters?.policy].filter(Boolean).join(" · "));
  const time = status.time ? new Date(status.time).toISOString() : null;
  setText("time", time ? `${time.slice(0, 10)} ${time.slice(11, 19)} UTC` : "–");
  if (time) $("time").dateTime = time;
  setText("footer", `${status.name} · up ${span(status.uptime * 1000)}`);
  const list = $("problems");
  // Screen readers read a problem again when its element is new, so numbers in a detail change in place.
  const kinds = status.problems.map((one) => `${one.level} ${one.text}`).join("\n");
  if (list.dataset.kinds !== kinds) {
    list.dataset.kinds = kinds;
    list.replaceChildren(...status.problems.map(problem));
  }
  status.problems.forEach((one, index) => {
    const detail = list.children[index].querySelector(".detail");
    if (detail && detail.textContent !== one.detail) detail.textContent = one.detail;
  });
}

function showTiles(status) {
  const { recent, parameters, simulated } = status;
  const nothing = status.learning.here ? "no window closed yet" : "see the worker that learns";
  const windows = recent.windows === 1 ? "last window" : `last ${recent.windows} windows`;
  setText("regret", short(simulated ? recent.pseudo : recent.posterior));
  setText("regret-note", recent.windows ? (simulated ? `exact; slates earn ${percent(recent.served_share)} of the best` : `if the model is right; at most ${short(recent.bound)}${status.calibration ? `; clicks ${ratio(status.calibration.ratio.estimate)} × predicted` : ""}`) : nothing);
  setText("revenue", percent(share(recent.reward, recent.expected)));
  setText("revenue-note", recent.windows ? `${short(recent.reward)} of ${short(recent.expected)} in the ${windows}` : nothing);
  setText("clicked", percent(share(recent.clicks, recent.sessions)));
  setText("clicked-note", recent.windows ? `${percent(share(recent.clicks, recent.displays))} of all displays` : nothing);
  setText("exploring", percent(share(recent.explored, recent.sessions)));
  const drawn = parameters?.policy === "epsilon-greedy";
  setText("exploring-name", drawn ? "Positions drawn at random" : "Positions with a bonus");
  const budget = parameters?.budget ?? null;
  setText("exploring-note", budget === null ? (drawn ? "the others show the best ad" : "for uncertain ads; not an experiment") : `for uncertain ads; budget ${percent(budget)}`);
  setText("version", parameters ? `v${count(parameters.version)}` : "–");
  setText("version-note", parameters ? `${parameters.age === null ? "the prior" : `${span(parameters.age)} old`} · ${brief(parameters.observations)} displays` : "none received yet");
}

/** What adcascade earns against the control group, if there is one. */
function showLift({ lift }) {
  $("lift-tile").hidden = !lift;
  if (!lift) return;
  setText("lift", lift.gained ?? "–");
  setText("lift-note", lift.note);
}

const samples = [];

function showRate(status) {
  const { uptime, counters } = status;
  if (samples.length && uptime < samples.at(-1).uptime) samples.length = 0; // the process was restarted
  if (!samples.length || uptime > samples.at(-1).uptime) samples.push({ uptime, ...counters });
  if (samples.length > MOST_SAMPLES) samples.shift();
  const rates = samples.slice(1).map((one, index) => (one.decisions - samples[index].decisions) / (one.uptime - samples[index].uptime));
  const [first, last] = [samples.at(-6) ?? samples[0], samples.at(-1)];
  const passed = last.uptime - first.uptime || uptime;
  const since = passed === uptime ? { decisions: 0, arrivals: 0, feedback: 0 } : first;
  setText("rate", count((last.decisions - since.decisions) / passed));
  setText("rate-note", `${count((last.arrivals - since.arrivals) / passed)} arrivals per second`);
  const most = Math.max(...rates, 1);
  const points = rates.map((rate, index) => `${((100 * index) / Math.max(1, rates.length - 1)).toFixed(1)} ${(23 - (20 * rate) / most).toFixed(1)}`);
  $("rate-line").replaceChildren(...(points.length > 1 ? [make("path", { d: `M-2 26L-2 ${points[0].split(" ")[1]}L${points.join("L")}L102 26Z` })] : []));
}

function showCharts({ windows, simulated, parameters }) {
  const x = clocks(windows.end);
  const regret = [
    { name: "pseudo", ink: "a", values: smooth(windows.pseudo), raw: windows.pseudo },
    { name: "posterior", ink: "c", values: windows.posterior },
    { name: "bound", ink: "d", values: windows.bound, style: "dashed" },
  ];
  charts.regret.draw({ x, series: regret });
  setText("regret-lead", simulated
    ? "Pseudo: exact, from the true model of the simulated users. If the model is right, posterior estimates it and bound is its upper limit. Logarithmic scale."
    : "Revenue lost per session against the best slate, if the model is right. Posterior: its own estimate. Bound: its upper limit at the confidence of β. Logarithmic scale.");
  charts.revenue.draw({ x, series: [
    { name: "earned", ink: "a", values: smooth(windows.reward), raw: windows.reward },
    { name: "expected", ink: "b", values: smooth(windows.expected) },
    { name: "best possible", ink: "d", values: smooth(windows.oracle), style: "dashed" },
  ] });
  const shares = (values) => values.map((value, index) => (value === null ? null : share(value, windows.sessions[index])));
  setText("explore-lead", `Share of positions (mode explore) ${parameters?.policy === "epsilon-greedy" ? "drawn at random" : "whose choice included a bonus for uncertain ads. The ad may be the best without it, too"}.`);
  charts.explore.draw({ x, series: [
    { name: "explored", ink: "a", values: shares(windows.explored), style: "filled" },
  ] });
}

/** Keep one table row per item: `create` makes a row, `update` fills it. */
function fillRows(id, items, nothing, create, update, columns = 5) {
  const body = $(id).tBodies[0];
  if (!items.length) {
    body.replaceChildren(make("tr", { class: "none" }, make("td", { colspan: String(columns) }, nothing)));
    return;
  }
  if (body.querySelector(".none")) body.replaceChildren();
  while (body.rows.length > items.length) body.lastElementChild.remove();
  items.forEach((item, index) => {
    if (!body.rows[index]) body.append(create(item));
    update(body.rows[index], item);
  });
}

/** Fill a table of {name, part, cells, level?}; the bar of a row has the length `part`. */
function fillBars(id, items, nothing) {
  const create = ({ cells }) => make("tr", {}, make("th", { scope: "row" }), make("td", { class: "bar", "aria-hidden": "true" }, make("span", { class: "track" }, make("span", { class: "fill" }))), ...cells.map(() => make("td")));
  fillRows(id, items, nothing, create, (row, { name, part, cells, level }) => {
    row.className = level ?? "";
    row.cells[0].textContent = name;
    row.cells[0].title = name;
    row.querySelector(".fill").style.width = `${(100 * Math.min(1, Math.max(0, part || 0))).toFixed(1)}%`;
    cells.forEach((text, index) => { row.cells[index + 2].textContent = text; });
  });
}

function showPositions({ positions, lately }) {
  const most = Math.max(...positions.map((one) => share(one.clicks, one.sessions) ?? 0), 1e-9);
  fillBars("positions", positions.map((one) => {
    const rate = share(one.clicks, one.sessions);
    return { name: String(one.position), part: rate / most, cells: [percent(rate), count(one.clicks)] };
  }), "No sessions yet.");
  const decided = Object.values(lately.modes).reduce((sum, one) => sum + one, 0);
  const modes = Object.entries(lately.modes).filter(([, made]) => made > 0).sort(([, one], [, other]) => other - one);
  fillBars("modes", modes.map(([mode, made]) => ({ name: mode, part: made / decided, cells: [percent(made / decided)] })), "None yet.");
  setText("positions-lead", `Among sessions without an earlier click${lately.span ? `, last ${span(lately.span)}` : ""}.`);
}

function showArms({ arms, users, parameters }) {
  const most = Math.max(...arms.map((one) => one.high), 1e-9);
  const along = (value) => `${((100 * value) / most).toFixed(2)}%`;
  const create = () => make("tr", {}, make("th", { scope: "row" }), make("td", { class: "bar" }, make("span", { class: "range", role: "img" }, make("i"), make("u"))), make("td"), make("td", { class: "extra" }), make("td"));
  fillRows("arms", arms, "No parameters have been received yet.", create, (row, one) => {
    row.className = one.active ? "" : "retired";
    row.cells[0].textContent = one.active ? one.arm : `${one.arm} (retired)`;
    row.cells[0].title = one.arm;
    const range = row.querySelector(".range");
    range.setAttribute("aria-label", `between ${percent(one.low)} and ${percent(one.high)}`);
    range.title = `${percent(one.low)} to ${percent(one.high)}`;
    const [bar, mark] = range.children;
    bar.style.left = along(one.low);
    bar.style.width = along(one.high - one.low);
    mark.style.left = along(one.probability);
    [percent(one.probability), short(one.reward), short(one.value)].forEach((text, index) => { row.cells[index + 2].textContent = text; });
  });
  if (!arms.length) return;
  const hidden = parameters ? parameters.active - arms.filter((one) => one.active).length : 0;
  const whom = users ? `averaged over ${count(users)} recent user${users === 1 ? "" : "s"}` : "for a user without features, as none has arrived yet";
  const named = (parameters?.strongest ?? []).map((one) => `${one.feature}${one.of === "ad" ? " of ads" : ""} (${one.word}, ${short(one.strength)})`);
  const strongest = named.length ? ` What decides between ads: ${named.join(", ")}.` : "";
  setText("arms-lead", `By expected revenue per display, ${whom}${hidden > 0 ? `; ${count(hidden)} more` : ""}.${strongest}`);
}

function showAds({ ads }) {
  const create = () => make("tr", {}, make("th", { scope: "row" }), ...Array.from({ length: 10 }, () => make("td")));
  fillRows("ads", ads?.sessions ? ads.ads : [], "No window with sessions is closed yet.", create, (row, { arm, total, today, note, does_badly }) => {
    row.className = `${does_badly ? "dead" : ""} ${row.sectionRowIndex === ads.top ? "below" : ""}`;
    row.cells[0].textContent = row.cells[0].title = arm;
    [note ?? "", count(total.displays), count(total.clicks), percent(total.click_rate), short(total.revenue), short(total.revenue_per_thousand),
      percent(total.answer_rate), percent(total.explored_share), count(today.displays), short(today.revenue)].forEach((text, index) => { row.cells[index + 1].textContent = text; });
  }, 11);
  if (!ads?.sessions) return;
  const others = ads.hidden || ads.ads.length > ads.top ? `; below the line, those that do badly, or earn least per display${ads.hidden ? ` (${count(ads.hidden)} more: adcascade arms list)` : ""}` : "";
  const since = new Date(ads.since).toISOString();
  setText("ads-lead", `Closed windows, ${count(ads.sessions)} sessions since ${since.slice(0, 10)} ${since.slice(11, 16)} UTC; today is ${ads.day} (UTC), ${count(ads.sessions_today)} sessions. Highest revenue first${others}.`);
}

function showCalibration({ calibration: known, recent }) {
  const tenths = known?.tenths ?? [];
  const rate = (one, clicks) => share(clicks, one.displays);
  const most = Math.max(...tenths.map((one) => rate(one, Math.max(one.clicks, one.predicted)) ?? 0), 1e-9);
  const name = (index) => (index === 0 ? "least likely tenth" : index === tenths.length - 1 ? "most likely tenth" : `tenth ${index + 1}`);
  fillBars("tenths", tenths.map((one, index) => ({
    name: name(index), part: rate(one, one.clicks) / most, cells: [percent(rate(one, one.predicted)), percent(rate(one, one.clicks)), ratio(share(one.clicks, one.predicted))],
  })), "Nothing was predicted yet: this begins with the second window that is learned from.");
  const ads = known?.ads ?? [];
  fillBars("misjudged", ads.map((one) => ({
    name: one.arm, part: Math.abs(one.deviations) / Math.max(4, Math.abs(ads[0].deviations)),
    cells: [short(one.predicted), count(one.clicks), `${one.deviations > 0 ? "+" : "−"}${Math.abs(one.deviations).toFixed(1)}`],
  })), "None yet.");
  const kinds = [...(known?.positions ?? []).map((one, index) => [`position ${index + 1}`, one]), ...(known?.sessions ?? []).map((one) => [KINDS[one.sessions], one])];
  const shown = Math.max(...kinds.map(([, one]) => one.displays), 1);
  fillBars("kinds", kinds.map(([label, one]) => ({ name: label, part: one.displays / shown, cells: [short(one.predicted), count(one.clicks), ratio(share(one.clicks, one.predicted))] })), "None yet.");
  if (!known) return;
  const loss = known.loss === null ? "" : ` Log loss: ${ratio(known.loss)} of that of one rate for all displays.`;
  setText("calibration-lead", `Users click ${ratio(known.ratio.estimate)} times as often as was predicted before it was learned (95 %: ${ratio(known.ratio.low)} to ${ratio(known.ratio.high)}).${loss} The regret, ${short(recent.posterior)} per session, holds if the model is right. By tenths of the displays, last ${count(known.windows)} windows:`);
  const left = known.left_out ? ` Not tested, for their number: ${count(known.left_out)}.` : "";
  setText("missed", known.missed.length ? `${known.missed.join(". ")}.` : `Nothing was found. Pairs of features that are tested for whether they matter together: ${count(known.tested)}.${left}`);
}

const KINDS = { chosen: "chosen ads", random: "random ads", control: "control group" };

const STAGES = { fetch: "… until fetched", queue: "… until handled", handle: "… handling", write: "… until acknowledged" };

/** What was forgotten, and when: "noticed at 14:05: older sessions now count 0.3". */
function change(forgetting) {
  if (!forgetting) return "–";
  if (forgetting.setting === 1) return "nothing is forgotten";
  if (forgetting.setting !== "auto") return `every window keeps ${percent(forgetting.setting)}`;
  if (!forgetting.time) return "none noticed";
  const anew = forgetting.ads.length ? [`${forgetting.ads.join(", ")} began anew`] : [];
  const faded = forgetting.kept < 1 ? [`older sessions now count ${short(forgetting.kept)}`] : [];
  return `noticed at ${clocks([forgetting.time])[0]}: ${[...anew, ...faded].join("; ")}`;
}

/** Values that a category does not list: "120: watch 80, tv 31". Rare ones are not named. */
function unlisted({ count: all, values }) {
  return [count(all), values.map(([value, times]) => `${value} ${count(times)}`).join(", ")].filter(Boolean).join(": ");
}

function showHealth(status) {
  const { lately, learning, sessions, balances, parameters } = status;
  const off = Object.entries(balances).filter(([, value]) => value !== 0);
  const facts = [
    ["Batch handling", `median ${seconds(lately.duration_p50)} · p99 ${seconds(lately.duration_p99)}`],
    ["Arrival to decision", `median ${seconds(lately.delay_p50)} · p99 ${seconds(lately.delay_p99)}`],
    ...Object.entries(STAGES).filter(([stage]) => lately.stages[stage]).map(([stage, name]) =>
      [name, `median ${seconds(lately.stages[stage].p50)} · p99 ${seconds(lately.stages[stage].p99)}`]),
    ["Open sessions", count(sessions.open)],
    ["Windows closed", `${count(learning.windows)}${learning.here ? "" : " here; no learner here"}`],
    ["Windows rejected", count(learning.rejected), learning.rejected ? "warn" : null],
    ["Change", change(parameters?.forgetting)],
    ["Late feedback", `${count(learning.late_feedback)}${learning.unknown_feedback ? ` · for unknown sessions ${count(learning.unknown_feedback)}` : ""}`],
    ...status.unlisted.map((one) => [`Values of ${one.feature} not listed`, unlisted(one), "warn"]),
    ["Late journal records", learning.here ? count(learning.late) : "–"],
    ["Balances", off.length ? off.map(([name, value]) => `${name} ${value > 0 ? "+" : ""}${value}`).join(", ") : "balanced", off.length ? "bad" : "good"],
  ];
  const list = $("facts");
  if (list.children.length !== facts.length) list.replaceChildren(...facts.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  facts.forEach(([, text, level], index) => {
    const value = list.children[index].lastElementChild;
    value.textContent = text;
    value.dataset.level = level ?? "";
  });
  const lag = Object.entries(status.lag);
  for (const id of ["h-lag", "lag"]) $(id).hidden = !lag.length; // only on Kafka
  const behind = Math.max(1000, ...lag.map(([, records]) => records));
  fillBars("lag", lag.map(([topic, records]) => ({ name: topic, part: records / behind, cells: [count(records)] })), "");
  const dead = Object.entries(status.dead);
  const most = Math.max(1, ...dead.map(([, records]) => records));
  setText("dead-lead", `Records that could not be used, by reason${lately.read ? `; recently ${percent(lately.dead / lately.read)} of all records` : ""}.`);
  fillBars("dead", dead.map(([reason, records]) => ({ name: reason, part: records / most, cells: [count(records)], level: "dead" })), "None.");
}

function show(status) {
  showState(status);
  showTiles(status);
  showLift(status);
  showRate(status);
  showCharts(status);
  showPositions(status);
  showAds(status);
  showArms(status);
  showCalibration(status);
  showHealth(status);
  document.body.classList.remove("stale");
  document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
}

// ── polling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

let paused = false;
let answered = null;

async function fetchStatus() {
  const answer = await fetch("status.json", { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT) });
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  return answer.json();
}

async function poll() {
  if (!paused && !document.hidden) {
    let status = null;
    try {
      status = await fetchStatus();
    } catch {
      document.body.classList.add("stale");
      $("pill").dataset.level = "bad";
      setText("pill-text", answered ? `No answer since ${answered.toTimeString().slice(0, 8)}` : "No answer");
    }
    if (status !== null && !paused) {
      answered = new Date();
      show(status);
    }
  }
  setTimeout(poll, document.body.classList.contains("stale") ? 3 * INTERVAL : INTERVAL);
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", String(paused));
  if (paused) {
    $("pill").dataset.level = "wait";
    setText("pill-text", "Paused");
  }
});

poll();

// A session: its lanes over time, the conversation as the harness wrote it, its judgement, tokens, group and events.
import { html } from "./vendor/htm-preact.js";
import { sessionPath, useData } from "./api.js";
import { names, toCall, toCompare, toSession, toSessions, withQuery } from "./route.js";
import { Ledger } from "./run.js";
import { A, Badge, Card, Checks, Chip, count, duration, Facts, LeftOut, listed, Long, Message } from "./widgets.js";
import { milliseconds, short, signed, Status, sum, T, TableCard, Tabs, total, utc, visible, Wait } from "./widgets.js";

const PHASES = ["retried", "queued", "preparing", "running", "judging"];
const LANE = 26; // height in pixels, as in style.css
const took = (call) => duration(milliseconds(call.started_at, call.finished_at));

/** Return how long a session was in each phase, as a text. */
function phases(session) {
  const seconds = PHASES.map((phase) => [phase, session[`${phase}_seconds`]]);
  const known = seconds.filter(([, value]) => value != null);
  return known.map(([phase, value]) => `${phase} ${duration(1000 * value)}`).join(", ");
}

function tone(call) {
  if (call.status !== "completed" || call.violation) return "bad";
  return call.left_out ? "warn" : call.kind === "rendered" ? "rendered" : "";
}

/** The lanes of a session over time: calls of the engine, the gaps between them, and events as marks. */
function Timeline({ view, lane }) {
  const { events } = view;
  const calls = new Map(view.calls.map((call) => [call.call_id, call]));
  const ended = (call) => call.finished_at ?? call.started_at;
  const { started_at: began, finished_at: end } = view.session ?? {};
  const callTimes = view.calls.flatMap((call) => [call.started_at, ended(call)]).sort();
  const times = [began, ...callTimes, ...events.map(({ at }) => at), end].filter(Boolean).sort();
  if (!callTimes.length) return null;
  const span = Math.max(1, milliseconds(times[0], times.at(-1)));
  const percent = (from, to) => `${((100 * milliseconds(from, to)) / span).toFixed(3)}%`;
  const drawn = ({ calls: ids }, lane) => ids.map((id) => {
    const call = calls.get(id);
    const why = call.left_out ? `, not trained: ${call.left_out}` : "";
    const title = visible(`${id}: ${call.role}, ${call.kind}, ${call.status}, ${took(call)}${why}`);
    const bar = (kind, to) => html`<rect class=${kind} x=${percent(times[0], call.started_at)} y=${lane * LANE + 4}
      width=${percent(call.started_at, to)} height="18"><title>${title}</title></rect>`;
    return html`<a href=${toCall(view.session_id, id)} tabindex="-1" aria-label=${title}>
      ${bar(`call ${tone(call)}`, ended(call))}
      ${call.first_token_at && bar("prefill", call.first_token_at)}</a>`;
  });
  const mark = ({ kind, at, host, path, detail }) => html`<text class=${kind === "fault" ? "bad" : "warn"}
    x=${percent(times[0], at)} y=${view.lanes.length * LANE + 17}>●<title
    >${visible(`${kind} ${host}${path} ${detail}`)}</title></text>`;
  const before = duration(milliseconds(began, callTimes[0]));
  const after = duration(milliseconds(callTimes.at(-1), end));
  const known = [before && `${before} before its first call`, after && `${after} after its last`].filter(Boolean);
  const alone = known.length ? ` · the harness alone: ${known.join(", ")}` : "";
  const engine = sum(view.calls.map((call) => milliseconds(call.started_at, ended(call))));
  return html`<${Card} title="Lanes" note=${`${duration(span)}, of which the engine ${duration(engine)} · grey:
      before the first token${alone}`}>
    <div class="lanes"><ul>
        ${view.lanes.map(({ name, calls: ids }) => html`<li><a href=${withQuery({ lane: name === lane ? "" : name })}
          aria-current=${name === lane ? "true" : undefined}>${name}</a> <small>${count(ids.length)}</small></li>`)}
        ${events.length > 0 && html`<li class="muted">events</li>`}</ul>
      <svg height=${(view.lanes.length + (events.length ? 1 : 0)) * LANE} width="100%">
        <rect class="prefill" x="0" y=${LANE / 2} width="100%" height="1" />
        ${view.lanes.map(drawn)}${events.map(mark)}</svg></div><//>`;
}

function CallBlock({ id, call, before, hide }) {
  const gap = before && duration(milliseconds(before.finished_at, call.started_at));
  const tokens = `${count(call.new_tokens)} + ${count(call.completion_tokens)} tokens`;
  const after = gap && `${gap} after the call before`;
  const meta = [tokens, `engine ${took(call)}`, after, call.finish_reason, call.kind_reason].filter(Boolean);
  return html`<article class="card callblock"><div class="bar">
      <${A} data-row to=${toCall(id, call.call_id)} text=${call.call_id} />
      ${call.kind === "rendered" && html`<${Badge} tone="rendered" text="rendered" title=${call.kind_reason} />`}
      ${call.role !== "agent" && html`<${Badge} text=${call.role} />`}
      ${call.status !== "completed" && html`<${Status} value=${call.status} />`}<${LeftOut} call=${call} />
      ${!hide.includes("meta") && html`<small><${T} text=${meta.join(" · ")} /></small>`}</div>
    ${[...call.messages, call.reply].map((message) => message && html`<${Message} message=${message} hide=${hide} />`)}
    </article>`;
}

function Conversation({ view, query }) {
  const lanes = view.lanes.filter((lane) => !query.lane || lane.name === query.lane);
  const calls = new Map(view.calls.map((call) => [call.call_id, call]));
  return html`<div class="bar"><span class="muted">hide</span>
      <${Checks} name="hide" options=${["reasoning", "tools", "meta"]} value=${query.hide} />
      ${query.lane && html`<${Chip} name="lane" value=${query.lane} />`}</div>
    ${lanes.map((lane) => html`<h3>${lane.name}</h3>${lane.calls.map((id, i) => html`<${CallBlock} key=${id}
      id=${view.session_id} call=${calls.get(id)} before=${calls.get(lane.calls[i - 1])}
      hide=${names(query.hide)} />`)}`)}`;
}

function diffTone(line) {
  if (/^(\+\+\+|---|diff|index|@@)/.test(line)) return "muted";
  return { "+": "added", "-": "removed" }[line[0]];
}

/** Lines of a text; those of a diff have the colours of what was added and removed. */
const Lines = ({ text }) => text.trimEnd().split("\n").map(
  (line) => html`<div class=${diffTone(line)}><${T} text=${line || " "} /></div>`);

const entryText = (entry) => (entry !== null && typeof entry === "object" ? listed(entry) : String(entry));

/** Return [name, value] of the evidence: of tests the counts and those that did not pass, of a list its entries. */
function evidenceRows(evidence, prefix = "") {
  return Object.entries(evidence ?? {}).flatMap(([name, value]) => {
    const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
    if (name === "judges" && isObject) {
      return Object.entries(value).flatMap(([judge, part]) => evidenceRows(part, `${prefix}${judge}: `));
    }
    if (name === "tests" && isObject) {
      const outcomes = [...Map.groupBy(Object.values(value), (outcome) => outcome)];
      const counts = outcomes.map(([outcome, tests]) => `${tests.length} ${outcome}`).join(", ");
      const bad = Object.entries(value).filter(([, outcome]) => outcome !== "passed");
      const names = bad.map(([test, outcome]) => `${test}: ${outcome}`).join("\n");
      return [[`${prefix}tests`, counts], [`${prefix}tests not passed`, names]];
    }
    if (isObject) return [[prefix + name, listed(value)]];
    if (Array.isArray(value)) return [[prefix + name, value.map(entryText).join("\n")]];
    const isText = typeof value === "string" && value.includes("\n");
    return [[prefix + name, isText ? html`<div class="code"><${Lines} text=${value} /></div>` : value]];
  });
}

const REVISIONS = [["revision"], ["status"], ["reward"], ["finished (UTC)", "finished_at", { show: utc }], ["error"]];

function Judgement({ view }) {
  const { parts, evidence, reward } = view.session ?? {};
  return html`<div class="two">
    <${Card} title="The judge" note=${`reward ${short(reward) || "none"}`}>
      <${Facts} rows=${[["parts", listed(parts, "\n")], ...evidenceRows(evidence)]} />
      <${Long} kind="code" text=${view.judge ?? "The run has no output of the judge."} /><//>
    <${Card} title="The agent's changes"><div class="code">
      <${Lines}
        text=${view.patch ?? "The run has no diff of this session."} /></div><//>
    ${view.log && html`<${Card} title="End of the harness's output" wide><${Long} kind="code" text=${view.log} /><//>`}
    ${view.revisions.length > 1 && html`<${TableCard} title="Rows of the session" note="the last counts" wide
      rows=${view.revisions} columns=${REVISIONS} />`}</div>`;
}

function Tokens({ view }) {
  const calls = [...view.calls].sort((a, b) => Boolean(b.left_out) - Boolean(a.left_out));
  const steps = [
    ["step", ({ step }) => `step ${step}`],
    ["weights", "version"],
    ["advantage", "advantage", { show: signed }],
    ["trained"],
    ["left out", (row) => listed(row.left_out) || row.reason],
  ];
  const why = (call) => html`<${LeftOut} call=${call} />`;
  const columns = [["call", "call_id"], ["role"], ["sampled", "completion_tokens"], ["why not trained", why]];
  return html`<div class="two"><${Ledger} ledger=${view.ledger} of="this session"
      done=${view.trained.length ? view.ledger.trained : 0} />
    <${TableCard} title="Steps of the training that took it" rows=${view.trained} columns=${steps}
      link=${({ step }) => toSessions({ step })} />
    <${TableCard} title="Calls" note="those that are not trained first" wide columns=${columns} rows=${calls}
      link=${(call) => toCall(view.session_id, call.call_id)} /></div>`;
}

function Group({ view: { session_id: id, group } }) {
  const columns = [
    ["session", "session_id"],
    ["outcome", ({ status }) => html`<${Status} value=${status} />`],
    ["reward"],
    ["advantage", "advantage", { show: signed }],
    ["", (row) => row.session_id !== id && html`<a href=${toCompare(id, row.session_id)}>compare</a>`],
  ];
  const link = (row) => toSession(row.session_id);
  return html`<${TableCard} title="Group" columns=${columns} rows=${group} link=${link} />`;
}

function Events({ view }) {
  const call = (id) => id && html`<${A} to=${toCall(view.session_id, id)} text=${id} />`;
  const [time, from] = [["at (UTC)", "at", { show: utc }], ["call", "call_id", { show: call }]];
  const columns = [time, ["kind"], ["host"], ["path"], ["detail"], from];
  return html`<${TableCard} title="Events" rows=${view.events} columns=${columns} />`;
}

const TABS = { conversation: Conversation, judgement: Judgement, tokens: Tokens, group: Group, events: Events };

export function Session({ id, query }) {
  const { data: view, error } = useData(sessionPath(id));
  if (!view) return html`<${Wait} error=${error} />`;
  const session = view.session ?? {};
  const newest = view.trained.at(-1);
  const Tab = TABS[query.tab] ?? Conversation;
  const { sampled, trained, left_out } = view.ledger;
  const own = newest ? "trained" : "to train";
  const link = (query, text) => text && html`<${A} to=${toSessions(query)} text=${text} />`;
  const versions = view.policy_versions.length ? view.policy_versions : [session.policy_version].filter(Boolean);
  const badge = ([rule, n]) => html`<${Badge} tone="bad" text=${`${rule} ${n}`} />`;
  return html`<h1><${T} text=${id} /> <${Status} value=${session.status} />
    <small>reward ${short(session.reward) || "none"}
      ${newest && `, advantage ${signed(newest.advantage) || "none"}`}</small></h1>
    <${Facts} rows=${[
      ["task", link({ task: session.task_id }, session.task_id)],
      ["group", link({ group: session.group_id, show: "groups" }, session.group_id)],
      ["harness", link({ harness: session.harness }, session.harness)],
      ["harness version", session.harness_version],
      ["weights", versions.map((version) => html`${link({ version }, version)} `)],
      ["started (UTC)", utc(session.started_at)],
      ["time", took(session)],
      ["phases", phases(session)],
      ["tokens", `${count(sampled)} = ${count(trained)} ${own} + ${count(total(left_out))} left out`],
      ["not trained", newest?.reason],
      ["error", session.error],
      ["suspicions", Object.entries(view.suspicions).map(badge)],
    ]} />
    <${Timeline} view=${view} lane=${query.lane} />
    <${Tabs} name="tab" value=${query.tab} options=${Object.keys(TABS)}
      sizes=${{ group: view.group.length, events: view.events.length }} />
    <${Tab} view=${view} query=${query} />`;
}

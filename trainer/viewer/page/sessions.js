// The sessions of a run: sorted, filtered, searched, or group by group.
import { html, useMemo } from "./vendor/htm-preact.js";
import { isFile, useData } from "./api.js";
import { change, names, toCall, toCompare, toSession, toSessions } from "./route.js";
import { Badge, Checks, Chip, count, duration, milliseconds, Select, short, signed, Status } from "./widgets.js";
import { T, Table, TableCard, total, utc, Wait } from "./widgets.js";

const rules = (row) => Object.keys(row.suspicions).filter((rule) => row.suspicions[rule]);
/** Return the policy version of a session without the attempt of its training, as the weights do not depend on it. */
export const weights = (row) => (row.policy_version ?? "default").replace(/^([0-9a-f]{8}\.\d+)\.\d+$/, "$1");

const suspicions = (_, row) => rules(row).map((rule) => html`<${Badge} tone="bad" text=${rule} title=${rule} />`);
const COLUMNS = [
  ["session", "session_id", { width: "13rem" }],
  ["task", "task_id", { width: "10rem" }],
  ["harness", "harness", { width: "7rem" }],
  ["outcome", "status", { width: "7rem", show: (status) => html`<${Status} value=${status} />` }],
  ["reward", "reward", { width: "5rem" }],
  ["advantage", "advantage", { width: "6rem", show: signed, title: "in the newest step" }],
  ["suspicions", (row) => rules(row).join(" "), { width: "8rem", show: suspicions, title: "of cheating, no proof" }],
  ["version", "policy_version", { width: "7rem" }],
  ["calls", "calls", { width: "4rem" }],
  ["sampled", "sampled", { width: "5rem", title: "sampled tokens" }],
  ["trained", "trained", { width: "5rem", title: "tokens to train" }],
  ["left out", (row) => row.left_out && total(row.left_out), { width: "5rem", title: "tokens" }],
  ["rendered", (row) => row.kinds?.rendered, { width: "5.5rem", title: "calls" }],
  ["faults", "faults", { width: "4.5rem" }],
  ["retries", "retries", { width: "4.5rem" }],
  ["time", (row) => milliseconds(row.started_at, row.finished_at), { width: "6rem", show: duration }],
  ["started (UTC)", "started_at", { width: "9.5rem", show: utc }],
  ["group", "group_id", { width: "9rem" }],
];

/** Columns that are shown at first: together they fit 1280 pixels. Others are chosen. */
const FIRST = [
  "session", "task", "harness", "outcome", "reward", "advantage", "suspicions", "calls", "sampled", "left out", "time",
];
const FURTHER = COLUMNS.map(([name]) => name).filter((name) => !FIRST.includes(name));

/** Filters by their names in the address: the label of a field to choose, and the values that a row has. */
const FILTERS = {
  status: ["outcome", (row) => [row.status]],
  task: ["task", (row) => [row.task_id]],
  harness: ["harness", (row) => [row.harness]],
  left_out: ["left out", (row) => [...Object.keys(row.left_out ?? {}), ...Object.values(row.steps).flat()]],
  kind: ["prompts", (row) => Object.keys(row.kinds ?? {})],
  role: ["role", (row) => Object.keys(row.roles ?? {})],
  suspicion: ["suspicion", rules],
  step: [null, (row) => Object.keys(row.steps)],
  group: [null, (row) => [row.group_id]],
  version: [null, (row) => [row.policy_version, weights(row)]],
  why: [null, (row) => Object.keys(row.rendered ?? {})],
  faults: [null, (row) => [row.faults ? "yes" : "no"]],
  retries: [null, (row) => [row.retries ? "yes" : "no"]],
};

/** Compare two values of a column; rows without one are last in both directions. */
function compare(a, b, sign) {
  const [noA, noB] = [a, b].map((value) => (value ?? "") === "" || Number.isNaN(value));
  if (noA || noB) return noA - noB;
  return sign * (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true }));
}

const has = (row, word) => JSON.stringify(Object.values(row)).toLowerCase().includes(word);

/** Return the rows that the query keeps, in its order. */
function select(rows, query) {
  const tests = Object.entries(FILTERS).filter(([name]) => query[name]);
  const wanted = (query.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const passes = (row) => tests.every(([name, [, values]]) => values(row).includes(query[name]));
  const kept = rows.filter((row) => passes(row) && wanted.every((word) => has(row, word)));
  const [, of] = COLUMNS.find(([name]) => name === query.sort) ?? [];
  if (!of) return kept;
  const keyed = kept.map((row) => [typeof of === "string" ? row[of] : of(row), row]);
  return keyed.sort(([a], [b]) => compare(a, b, query.down ? -1 : 1)).map(([, row]) => row);
}

/** A link to the comparison of the sessions with the highest and the lowest reward. */
export function BestAndWorst({ rows }) {
  const ranked = rows.filter((row) => row.reward !== null).sort((a, b) => a.reward - b.reward);
  if (ranked.length < 2) return null;
  return html`<a href=${toCompare(ranked.at(-1).session_id, ranked[0].session_id)}
    >compare ${ranked[0].reward < ranked.at(-1).reward ? "best and worst" : "two"}</a>`;
}

/** Return rows by group, each group after a heading; groups with a signal are first. */
function byGroup(rows) {
  const groups = [...Map.groupBy(rows, (row) => row.group_id)].map(([group, members]) => {
    const rewards = members.map((row) => row.reward).filter((reward) => reward !== null);
    return { group, members, rewards, worst: Math.min(...rewards), best: Math.max(...rewards) };
  });
  groups.sort((a, b) => (b.worst < b.best) - (a.worst < a.best));
  return groups.flatMap(({ group, members, rewards, worst, best }) => {
    const range = rewards.length ? `rewards ${short(worst)} to ${short(best)}` : "no rewards";
    const signal = worst < best ? "signal" : "no signal";
    const facts = [members[0].task_id, `${members.length} sessions`, range, signal].join(" · ");
    const heading = html`<${T} text=${group} /> <small><${T} text=${facts} /></small>${" "}
      <${BestAndWorst} rows=${members} />`;
    return [{ heading }, ...members];
  });
}

function Said({ text }) {
  const { data, error } = useData(`api/search?q=${encodeURIComponent(text)}`);
  if (!data) return html`<${Wait} error=${error} />`;
  const link = ({ session_id, call_id }) => (call_id ? toCall(session_id, call_id) : toSession(session_id));
  return html`<${TableCard} title=${`Said in ${count(data.sessions.length)}${data.cut ? " or more" : ""} places`}
    columns=${[["session", "session_id"], ["words", "text"]]} rows=${data.sessions} link=${link} />`;
}

export function Sessions({ query }) {
  const { data, error } = useData("api/sessions");
  const rows = data?.sessions;
  const { said, show, ...filters } = query;
  const key = JSON.stringify(filters);
  const kept = useMemo(() => rows && select(rows, query), [rows, key]);
  const items = useMemo(() => (kept && show ? byGroup(kept) : kept), [kept, show]);
  const fields = useMemo(() => {
    const values = (name, of) => [...new Set([...(rows ?? []).flatMap(of), query[name]])].filter(Boolean).sort();
    return Object.entries(FILTERS).flatMap(([name, [label, of]]) => (label ? [[name, label, values(name, of)]] : []));
  }, [rows, key]);
  if (!rows) return html`<${Wait} error=${error} />`;
  const chips = Object.keys(query).filter((name) => FILTERS[name]?.[0] === null);
  const chosen = [...FIRST, ...names(query.columns)];
  const columns = COLUMNS.filter(([name]) => chosen.includes(name));
  const onSort = (column) => {
    if (query.sort !== column) change({ sort: column, down: "" });
    else change(query.down ? { sort: "", down: "" } : { down: "1" });
  };
  const search = (event) => (event.preventDefault(), change({ said: event.target.elements.said.value }));
  return html`<h1>${count(kept.length)} <small>of ${count(rows.length)} sessions</small></h1>
    <div class="bar">
      <input type="search" placeholder="filter: words of a row  (/)" aria-label="filter by words" value=${query.q ?? ""}
        onInput=${(event) => change({ q: event.target.value })} />
      ${fields.map(([name, label, values]) => (values.length > 1 || query[name]) && html`<${Select} key=${name}
        name=${name} label=${label} value=${query[name] ?? ""} options=${["", ...values]} />`)}
      <${Checks} name="show" options=${["groups"]} value=${show} />
      <details class="choice"><summary>columns</summary>
        <${Checks} name="columns" options=${FURTHER} value=${query.columns} /></details>
      ${chips.map((name) => html`<${Chip} key=${name} name=${name} value=${query[name]} />`)}
      ${Object.keys(query).length > 0 && html`<a href=${toSessions()}>reset</a>`}
      ${!isFile && html`<form onSubmit=${search}><input name="said" type="text" value=${said ?? ""}
        placeholder="search in what was said" aria-label="search in what was said" /> <button>search</button></form>`}
    </div>
    ${said && !isFile && html`<${Said} text=${said} />`}
    <${Table} columns=${columns} rows=${items} link=${(row) => toSession(row.session_id)}
      sort=${{ name: query.sort, down: query.down }} onSort=${onSort} />
    ${!items.length && html`<p class="muted">No session matches.</p>`}`;
}

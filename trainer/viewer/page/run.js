// The run in numbers. Every number leads to the sessions behind it.
import { html } from "./vendor/htm-preact.js";
import { useData } from "./api.js";
import { Metrics } from "./plots.js";
import { toSessions } from "./route.js";
import { BestAndWorst, weights } from "./sessions.js";
import { A, Badge, Card, count, Facts, share, short, Status, sum, T } from "./widgets.js";
import { TableCard, total, Wait } from "./widgets.js";

const to = (query, text) => html`<${A} to=${toSessions(query)} text=${text} />`;
const Bar = ({ value, of }) => html`<span class="track"
  ><i style=${{ width: `${of && (100 * value) / of}%` }}></i></span>`;

/** Return the least and the greatest reward: of a judge's usual range, 0 to 1, or of the run if it has others. */
export function rewardRange(rows) {
  const rewards = rows.map(({ reward }) => reward).filter((reward) => typeof reward === "number");
  const less = (a, b) => Math.min(a, b);
  const greater = (a, b) => Math.max(a, b);
  return [rewards.reduce(less, 0), rewards.reduce(greater, 1)];
}

/** Rewards of sessions by `of(row)`. `query(value)` are the filters of the sessions behind a value. */
function Rewards({ title, name, rows, of, query, show }) {
  const groups = [...Map.groupBy(rows, (row) => of(row) ?? "")].map(([value, members]) => {
    const rewards = members.map(({ reward }) => reward).filter((reward) => reward !== null);
    const mean = rewards.length ? sum(rewards) / rewards.length : null;
    return { value, sessions: members.length, rewarded: rewards.length, mean };
  });
  const [least, most] = rewardRange(rows);
  const bar = ({ mean }) => mean !== null && html`<${Bar} value=${mean - least} of=${most - least} />`;
  const columns = [
    [name, ({ value }) => value || "none", { show }],
    ["sessions"],
    ["rewarded"],
    ["mean"],
    ["", bar],
  ];
  return html`<${TableCard} title=${title} columns=${columns} rows=${groups}
    link=${({ value }) => toSessions(query(value))} />`;
}

/** Numbers by name. `query(name)` are the filters of the sessions behind them. */
function Counts({ title, note, of = "calls", counts, query }) {
  const all = total(counts);
  const columns = [
    ["", ([name]) => name || "unknown"],
    [of, ([, number]) => number],
    ["", ([, number]) => share(number / (all || 1))],
    ["", ([, number]) => html`<${Bar} value=${number} of=${all} />`],
  ];
  const rows = Object.entries(counts).sort(([, a], [, b]) => b - a);
  return html`<${TableCard} title=${title} note=${note} columns=${columns} rows=${rows}
    link=${([name]) => toSessions(query(name))} />`;
}

/** Sampled tokens: those that steps trained (`done`), those that no step took yet, and the others by reason. */
export function Ledger({ ledger: { sampled, trained, left_out }, of, done }) {
  const left = Object.entries(left_out).map(([reason, tokens]) => [`left out: ${reason}`, tokens]);
  const own = [["trained", done], ["to train", trained - done]].filter(([, tokens]) => tokens);
  const counts = Object.fromEntries([...own, ...left]);
  const query = (name) => ({ left_out: name.split("left out: ")[1] });
  const adds = total(counts) === sampled ? "" : ": THEY DO NOT ADD UP";
  return html`<${Counts} title="Ledger" note=${`${count(sampled)} tokens that the calls of ${of} sampled${adds}`}
    of="tokens" counts=${counts} query=${query} />`;
}

function Groups({ groups }) {
  const sorted = [...groups].sort((a, b) => b.signal - a.signal);
  const rewards = (group) => group.rewards.slice(0, 16).map((reward) => short(reward) || "–").join("  ");
  const rows = (group) => group.sessions.map((session_id, i) => ({ session_id, reward: group.rewards[i] }));
  const columns = [
    ["group", "group_id"],
    ["task", "task_id"],
    ["rewards", rewards],
    ["", (group) => (group.signal ? html`<${BestAndWorst} rows=${rows(group)} />` : "no signal")],
  ];
  const flat = groups.filter((group) => !group.signal).length;
  return html`<${TableCard} title="Groups" note=${`${flat} of ${groups.length} without signal`} wide columns=${columns}
    rows=${sorted} link=${(group) => toSessions({ group: group.group_id, show: "groups" })} />`;
}

function Steps({ steps }) {
  const leftOut = ({ step, left_out }) => Object.entries(left_out).map(([reason, tokens]) =>
    html`${to({ step, left_out: reason }, `${reason}: ${count(tokens)}`)} `);
  const name = ({ step }) => `step ${step}`;
  const columns = [["step", name], ["sessions"], ["sampled"], ["trained"], ["left out", leftOut]];
  return html`<${TableCard} title="Steps of the training" note="in tokens" wide columns=${columns} rows=${steps}
    link=${({ step }) => toSessions({ step })} />`;
}

const CACHE = [
  ["harness", ({ harness }) => harness || "unknown"],
  ["prompts", "kind"],
  ["tokens", ({ prompts }) => prompts.prompt_tokens],
  ["cached", "share", { show: share }],
  ["", ({ unused }) => unused && html`<${Badge} tone="bad" text="unused" />`],
];
const SUSPICIONS = [["rule"], ["sessions"], ["looks for", "looks_for"]];
const NOTES = {
  retried: "retried requests", faults: "requests that failed by a fault", uncaptured_calls: "model calls not captured",
  continued: "continued after an engine failure", switched: "continued with other weights",
  rejected: "rejected requests", hidden: "calls with hidden images or files", unauthorised: "unauthorised requests",
  interrupted: "interrupted calls",
};
const EVALUATION = [["version", "policy_version"], ["sessions"], ["mean", "mean_reward"], ["best", "best_reward"]];
const BEHIND = { retried: { retries: "yes" }, faults: { faults: "yes" } };

export function Run({ query }) {
  const { data, error } = useData("api/run");
  const rows = useData("api/sessions").data?.sessions ?? [];
  if (!data) return html`<${Wait} error=${error} />`;
  const { run, read, faults, summary, groups, training } = data;
  const done = sum(rows.filter(({ steps }) => Object.keys(steps).length).map(({ trained }) => trained));
  const rewards = (name, of) => html`<${Rewards} title=${`Rewards by ${name}`} name=${name} rows=${rows} of=${of}
    query=${(value) => ({ [name]: value })} />`;
  const notes = Object.entries(NOTES).filter(([name]) => summary[name]).map(([name, text]) =>
    [text, BEHIND[name] ? to(BEHIND[name], count(summary[name])) : summary[name]]);
  const mixed = summary.mixed.map(({ group_id, values }) => ["group with unlike sessions",
    html`${to({ group: group_id, show: "groups" }, group_id)} <${T} text=${Object.keys(values).join(", ")} />`]);
  return html`<h1><${T} text=${run.name} />
      <small><${T} text=${run.model} /> · ${count(rows.length)} sessions · <${T} text=${run.path} /></small></h1>
    ${faults.map((fault) => html`<${Wait} error=${fault} />`)}
    ${read.sessions < read.of && html`<p class="muted" role="status">
      calls of ${count(read.sessions)} of ${count(read.of)} sessions read; numbers of calls and tokens are of these
      <progress value=${read.sessions} max=${read.of} /></p>`}
    ${run.tokenizer && html`<p class="muted">Tokens are shown as ids: <${T} text=${run.tokenizer} /></p>`}
    <div class="columns">
      <${Ledger} ledger=${summary.ledger} of=${`${count(read.sessions)} sessions`} done=${done} />
      <${Rewards} title="Outcomes" name="outcome" rows=${rows} of=${(row) => row.status}
        query=${(status) => ({ status })} show=${(status) => html`<${Status} value=${status} />`} />
      ${rewards("version", weights)}
      <${TableCard} title="Evaluation" note=${`a run of its own: rolltap view ${run.path}/evaluation`}
        columns=${EVALUATION} rows=${data.evaluation} />
      ${rewards("task", (row) => row.task_id)}
      ${rewards("harness", (row) => row.harness)}
      ${training?.metrics.length > 0 && html`<${Metrics} rows=${training.metrics} query=${query} />`}
      <${Steps} steps=${training?.steps ?? []} />
      <${Groups} groups=${groups} />
      <${Counts} title="Prompts" note="rendered: in full, although there were replies" counts=${summary.kinds}
        query=${(kind) => ({ kind })} />
      <${Counts} title="Why prompts were rendered" counts=${summary.rendered}
        query=${(why) => ({ kind: "rendered", why })} />
      <${Counts} title="Roles of calls" counts=${summary.roles} query=${(role) => ({ role })} />
      <${TableCard} title="Prefix cache of the engine" note="prompt tokens" columns=${CACHE} rows=${summary.cache}
        link=${({ harness, kind }) => toSessions({ harness, kind })} />
      <${TableCard} title="Suspicions" note="no proof: look at the sessions" columns=${SUSPICIONS}
        rows=${summary.suspicions} link=${({ rule }) => toSessions({ suspicion: rule })} />
      ${notes.length + mixed.length > 0 && html`<${Card} title="Notes"><${Facts} rows=${[...notes, ...mixed]} /><//>`}
      <${Counts} title="Violations of a call's tokens" counts=${summary.violations}
        query=${() => ({ left_out: "violation" })} />
    </div>`;
}

// The metrics of a training over its steps: panels of metrics that belong together, and one metric with links.
import { html } from "./vendor/htm-preact.js";
import { change, toSessions } from "./route.js";
import { Card, Select, short, T } from "./widgets.js";

/** Title of a panel -> its metrics. */
const PANELS = {
  "reward": /^reward(\/.+)?$/,
  "loss": /^loss$/,
  "gradient norm": /^grad_norm$/,
  "learning rate": /^learning_rate$/,
  "seconds of a step": /^seconds_/,
  "engine difference": /^(engine_difference|difference\/.+)$/,
  "evaluation": /^eval\/(reward|pass[@^]\d+)$/,
  "difference off policy": /^off_policy\//,
  "importance ratio": /^ratio\//,
  "share of tokens out of bounds": /^(clip_ratio\/(low|high)_mean|cispo_clip_ratio|(masked|truncated)\/.+)$/,
  "entropy, KL": /^(entropy|kl|teacher_kl)$/,
  "sessions": /^(sessions(_.+)?|suspicious)$/,
  "groups": /^groups/,
  "sampled tokens": /^(tokens_(trained|computed)|left_out\/.+)$/,
  "tokens a second": /^tokens_per_second$/,
  "peak memory, GiB": /^peak_memory_gib$/,
};
const MOST = 8; // lines of a panel with a colour and a label, as in style.css
const HEIGHT = 195;

/** Return [step, value] of each row that has a metric. An evaluation is of the weights of an earlier step. */
function pointsOf(rows, name) {
  const step = name.startsWith("eval/") ? "eval/step" : "step";
  return rows.filter((row) => typeof row[name] === "number").map((row) => [row[step], row[name]]);
}

/** Return the names of a panel that say something: of several, one that is 0 in each step does not. */
function namesOf(rows, names, pattern) {
  const own = names.filter((name) => pattern.test(name));
  return own.length > 1 ? own.filter((name) => rows.some((row) => row[name])) : own;
}

function ends(numbers) {
  return [numbers.reduce((a, b) => Math.min(a, b)), numbers.reduce((a, b) => Math.max(a, b))];
}

/** Return a number with at most nine characters. */
const brief = (value) => (Math.abs(value) >= 1e6 ? value.toExponential(2) : short(value));

/** Lines of [step, value]. With `links` each point is a link to the sessions of its step. */
function Chart({ lines, label, width, links }) {
  const points = lines.flat();
  const [first, last] = ends(points.map(([step]) => step));
  const [low, high] = ends(points.map(([, value]) => value));
  const scale = (least, most, from, to) => (value) => from + ((to - from) * (value - least)) / (most - least || 1);
  const x = scale(first, last, 70, width - 25);
  const y = scale(low, high, 165, 15);
  const limit = (value) => html`<line x1="70" x2=${width - 25} y1=${y(value)} y2=${y(value)} />
    <text class="limit" x="62" y=${y(value) + 4}>${brief(value)}</text>`;
  const circle = ([step, value]) => html`<circle cx=${x(step)} cy=${y(value)} r=${links ? 4 : 2}
    ><title>step ${step}: ${short(value)}</title></circle>`;
  const point = (each) => html`<a href=${toSessions({ step: each[0] })}
    aria-label=${`step ${each[0]}: ${short(each[1])}`}>${circle(each)}</a>`;
  const line = (each, i) => html`<g class=${i < MOST ? `line${i}` : "more"}>
    <polyline points=${each.map(([step, value]) => `${x(step)},${y(value)}`).join(" ")} />
    ${links ? each.map(point) : each.length === 1 && circle(each[0])}</g>`;
  return html`<svg class="chart" viewBox=${`0 0 ${width} ${HEIGHT}`} role="group" aria-label=${`${label} by step`}>
    ${[...new Set([low, high])].map(limit)}
    ${[...new Set([first, last])].map((step) => html`<text x=${x(step)} y="190">${step}</text>`)}
    ${lines.map(line)}</svg>`;
}

function Panel({ title, names, rows, chosen }) {
  const lines = names.map((name) => pointsOf(rows, name));
  const chip = (name, i) => html`<button key=${name} class="chip" aria-pressed=${name === chosen}
    onClick=${() => change({ metric: name })}><i class=${`line${i}`}></i>
    <${T} text=${`${name} ${brief(lines[i].at(-1)[1])}`} /></button>`;
  return html`<figure class="plot"><h3>${title}</h3><${Chart} lines=${lines} label=${title} width=${400} />
    <div class="legend">${names.slice(0, MOST).map(chip)}
      ${names.length > MOST && html`<span class="muted">and ${names.length - MOST} more</span>`}</div></figure>`;
}

/** The metrics of a training. `query.metric` is the one whose points are links. */
export function Metrics({ rows, query }) {
  const numbers = rows.flatMap((row) => Object.keys(row).filter((name) => typeof row[name] === "number"));
  const names = [...new Set(numbers)].filter((name) => !["step", "eval/step"].includes(name)).sort();
  if (!names.length) return null;
  const panels = Object.entries(PANELS).map(([title, pattern]) => [title, namesOf(rows, names, pattern)]);
  const metric = [query.metric, "reward", ...names].find((name) => names.includes(name));
  return html`<${Card} title="Metrics of the training" wide note="newest values; a point leads to its step">
    <div class="bar"><${Select} name="metric" value=${metric} options=${names} /></div>
    <${Chart} lines=${[pointsOf(rows, metric)]} label=${metric} width=${1000} links />
    <div class="plots">${panels.filter(([, own]) => own.length).map(([title, own]) =>
      html`<${Panel} key=${title} title=${title} names=${own} rows=${rows} chosen=${metric} />`)}</div><//>`;
}

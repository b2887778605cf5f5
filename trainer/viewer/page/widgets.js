// Parts of all views: text that is never markup, numbers, links, messages, tables drawn as they are scrolled to.
import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { change, names, withQuery } from "./route.js";

// control, bidi and invisible characters, but for line feed, tab and the joiners of scripts and emojis
const HIDDEN = /((?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}])/u;

function symbol(character) {
  const code = character.codePointAt(0);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

/** Return a text with symbols for characters that are not seen, as for a tooltip. */
export const visible = (text) => String(text).replace(new RegExp(HIDDEN, "gu"), symbol);

/** Return a text as children: what is not seen is a marked symbol. */
export function marked(text) {
  const parts = String(text).split(HIDDEN);
  if (parts.length === 1) return parts[0];
  return parts.map((part, i) => (i % 2 ? html`<i class="mark">${symbol(part)}</i>` : part));
}

/** A text of the run, isolated from the words around it. */
export const T = ({ text }) => html`<bdi>${marked(text === false ? "" : text ?? "")}</bdi>`;
/** Return a value as an element: a number has few digits; elements stay. */
function shown(value) {
  if (value !== null && typeof value === "object") return value;
  return html`<${T} text=${typeof value === "number" ? short(value) : value} />`;
}

export const count = (value) => (typeof value === "number" ? value.toLocaleString("en-US") : "");
export const share = (value) => (typeof value === "number" ? `${(100 * value).toFixed(1)} %` : "");
/** Return a number with few digits; texts, such as "-Infinity", stay. */
export function short(value, digits = 3) {
  if (typeof value !== "number") return value ?? "";
  if (Number.isInteger(value)) return count(value);
  const size = Math.abs(value);
  return size < 10 ** -digits || size >= 1e6 ? value.toExponential(2) : String(+value.toFixed(digits));
}
export const signed = (value) => (typeof value === "number" && value > 0 ? "+" : "") + short(value);
export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
export const total = (numbers) => sum(Object.values(numbers));
/** Return milliseconds as a duration. */
export function duration(ms) {
  if (!Number.isFinite(ms)) return "";
  if (ms < 60_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
  const minutes = Math.floor(ms / 60_000);
  if (minutes < 60) return `${minutes} min ${Math.floor((ms % 60_000) / 1000)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}
export const milliseconds = (from, to) => (from && to ? new Date(to) - new Date(from) : NaN);
/** Return a time in UTC, as 2026-01-01 00:00:31. */
export const utc = (time) => time?.slice(0, 19).replace("T", " ");
const written = (value, indent = 1) => (typeof value === "string" ? value : JSON.stringify(value, null, indent));
/** Return names and values of an object as a text. */
export function listed(values, separator = ", ") {
  const indent = separator === "\n" ? 1 : 0;
  return Object.entries(values ?? {}).map(([name, value]) => `${name}: ${written(value, indent)}`).join(separator);
}

/** A link. Its text is one of the run's. The keys j and k go to those with `data-row`. */
export const A = ({ to, text, ...rest }) => html`<a href=${to} ...${rest}><${T} text=${text} /></a>`;

export const Badge = ({ text, tone = "", title }) =>
  text ? html`<span class=${`badge ${tone}`} title=${title && visible(title)}><${T} text=${text} /></span>` : null;
const TONES = {
  completed: "good", timeout: "warn", budget: "warn", failed: "bad", aborted: "bad", infrastructure: "bad",
};
export const Status = ({ value }) => html`<${Badge} text=${value ?? "unknown"} tone=${TONES[value] ?? ""} />`;
/** Why the sampled tokens of a call are not trained. */
export const LeftOut = ({ call: { left_out, violation } }) => html`
  <${Badge} tone="warn" text=${left_out && `not trained: ${left_out}`} /><${Badge} tone="bad" text=${violation} />`;

/** A choice for the value `name` of the query; an empty option stands for any. */
export const Select = ({ name, label = name, value, options }) => html`<label class="select"
  >${label} <select value=${value} onChange=${(event) => change({ [name]: event.target.value })}>
    ${options.map((each) => html`<option value=${each} selected=${each === value}>${visible(each || "any")}</option>`)}
  </select></label>`;

/** Boxes to check; the names of those that are on are the value `name` of the query. */
export function Checks({ name, options, value }) {
  const on = names(value);
  const toggled = (each) => (on.includes(each) ? on.filter((other) => other !== each) : [...on, each]);
  return options.map((each) => html`<label key=${each}><input type="checkbox" checked=${on.includes(each)}
    onChange=${() => change({ [name]: toggled(each).join(",") })} /> ${each}</label>`);
}

/** Links that set the value `name` of the query. The first is what is shown without one. */
export const Tabs = ({ name, value, options, sizes }) => html`<nav class="tabs">${options.map((tab, i) =>
  html`<a href=${withQuery({ [name]: i ? tab : "" })} aria-current=${(value ?? options[0]) === tab ? "page" : undefined}
    >${tab} ${sizes[tab]}</a>`)}</nav>`;

/** A value of the query that is not in a choice; a click removes it. */
export const Chip = ({ name, value }) => html`<button class="chip" aria-label=${`remove ${name}`}
  onClick=${() => change({ [name]: "" })}>${name}: <${T} text=${value} /> ✕</button>`;

/** A part of a page with a title. */
export const Card = ({ title, note, wide, children }) => html`<section class=${wide ? "card wide" : "card"}>
  <h2>${title}${note ? html` <small>${note}</small>` : null}</h2>${children}</section>`;

/** Names and values; those without a value are left out. */
export const Facts = ({ rows }) => html`<dl class="facts">${rows
  .filter(([, value]) => (value || value === 0) && value.length !== 0)
  .map(([name, value]) => html`<div><dt><${T} text=${name} /></dt><dd>${shown(value)}</dd></div>`)}</dl>`;

/** What is shown while an answer is read, or instead of it. */
export const Wait = ({ error }) => html`<p class=${error ? "error" : "muted"} role=${error && "alert"}
  ><${T} text=${error ?? "Loading …"} /></p>`;

/** A long text, which scrolls in itself. */
export const Long = ({ text, kind = "text" }) => text && html`<div class=${kind}><${T} text=${text} /></div>`;

const FOLDED = { lines: 12, characters: 1200 };

/** A text of a message. One that is long shows its first lines, until it is opened. */
function Folded({ text, kind = "text" }) {
  const [isOpen, setOpen] = useState(false);
  const whole = String(text ?? "");
  const lines = whole.split("\n").length;
  if (lines <= FOLDED.lines && whole.length <= FOLDED.characters) return html`<${Long} kind=${kind} text=${text} />`;
  const size = `${count(lines)} lines, ${count(whole.length)} characters`;
  return html`<div class=${kind}><div class=${isOpen ? "" : "folded"}><${T} text=${text} /></div>
    <button aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>${isOpen ? "fold" : `show all: ${size}`}</button>
    </div>`;
}

function argumentsText(given) {
  try {
    return listed(typeof given === "string" ? JSON.parse(given) : given, "\n");
  } catch {
    return String(given);
  }
}

/** A message of a conversation, as the harness wrote it. `hide` has what is not shown: reasoning, tools. */
export function Message({ message: { role, content, reasoning_content, tool_calls }, hide = [] }) {
  if (role === "tool" && hide.includes("tools")) return null;
  const tools = hide.includes("tools") ? [] : tool_calls ?? [];
  const parts = [content ?? ""].flat().map((part) => part.text ?? written(part));
  return html`<div class=${role === "tool" ? "message tool" : "message"}>
    <div class=${role === "assistant" ? "role own" : "role"}><${T} text=${role} /></div><div>
      ${!hide.includes("reasoning") && html`<${Folded} kind="reasoning" text=${reasoning_content} />`}
      <${Folded} text=${parts.join("\n")} />
      ${tools.map((call) => html`<div class="toolcall"><b><${T} text=${call.function?.name} /></b>
        <${Folded} text=${argumentsText(call.function?.arguments)} /></div>`)}</div></div>`;
}

const ROW = 27; // height of a row in pixels, as in style.css
const SPARE = 20;
const scrolled = new Map();

/**
 * A table, of which only the rows near the view are drawn. A column is [name, of, {show, title, width}]: `of(row)`, or
 * the row's value of that name, is the value of a cell, and `show(value, row)` how it is written. Numbers are aligned.
 * `link(row)` is where a row leads. A row with `heading` is one cell.
 */
export function Table({ columns, rows, link, sort, onSort }) {
  const frame = useRef();
  const [top, setTop] = useState(0);
  const place = `${columns[0][0]} ${location.hash}`;
  useLayoutEffect(() => {
    if (scrolled.has(place)) frame.current.scrollTop = scrolled.get(place);
  }, [place]);
  const onScroll = ({ currentTarget: { scrollTop } }) => {
    scrolled.set(place, scrollTop);
    if (Math.abs(scrollTop - top) > (SPARE / 2) * ROW) setTop(scrollTop);
  };
  const first = Math.max(0, Math.min(Math.floor(top / ROW), rows.length - 1) - SPARE);
  const last = Math.min(rows.length, first + Math.ceil(innerHeight / ROW) + 2 * SPARE);
  const made = columns.map(([name, of = name, { show, title, width } = {}]) => {
    const value = typeof of === "string" ? (row) => row[of] : of;
    const isNumber = rows.slice(0, 100).some((row) => !row.heading && typeof value(row) === "number");
    const cell = (row) => shown(show ? show(value(row), row) : value(row));
    return { name, title, width, cell, kind: isNumber ? "number" : undefined };
  });
  const header = ({ name, title, kind }) => {
    const arrow = sort?.name === name && (sort.down ? "↓" : "↑");
    return html`<th class=${kind} title=${title} scope="col"
      aria-sort=${arrow ? (sort.down ? "descending" : "ascending") : undefined}>
      ${onSort ? html`<button onClick=${() => onSort(name)}>${name} ${arrow}</button>` : name}</th>`;
  };
  const drawn = (row, i) => {
    const { heading } = row;
    if (heading) return html`<tr key=${first + i} class="heading"><td colspan=${columns.length}>${heading}</td></tr>`;
    const to = link?.(row);
    const open = (event) => event.target.closest("a, button") || getSelection().toString() || (location.hash = to);
    return html`<tr key=${to ?? first + i} class=${to && "link"} onClick=${to && open}>${made.map(({ cell, kind }, j) =>
      html`<td class=${kind}>${j || !to ? cell(row) : html`<a href=${to} data-row="">${cell(row)}</a>`}</td>`)}</tr>`;
  };
  const width = made.flatMap((column) => column.width ?? []).join(" + ");
  const space = (number, key) => number > 0 && html`<tr key=${key} aria-hidden="true"
    ><td style=${{ height: `${number * ROW}px` }} /></tr>`;
  return html`<div class="table" ref=${frame} onScroll=${onScroll}>
    <table aria-rowcount=${rows.length} style=${{ width: width && `calc(${width})` }}>
    <colgroup>${made.map(({ width }) => html`<col style=${{ width }} />`)}</colgroup>
    <thead><tr>${made.map(header)}</tr></thead>
    <tbody>${space(first, "above")}${rows.slice(first, last).map(drawn)}${space(rows.length - last, "below")}</tbody>
    </table></div>`;
}

/** A table with a title; nothing without rows. */
export const TableCard = ({ title, note, wide, ...table }) => table.rows.length > 0 && html`
  <${Card} title=${title} note=${note} wide=${wide}><${Table} ...${table} /><//>`;

// The tokens of a call: what is known of them, the colours that show it, and their text in blocks.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { change, route, toCall, toSessions } from "./route.js";
import { A, count, Facts, marked, short, signed, T } from "./widgets.js";

const BLOCK = 400; // tokens after which a block ends with a line, so that no line is broken; it ends at twice as many
const NEW = "new in this prompt";
const spelled = (text) => text.replaceAll("\t", "⇥\t").replaceAll("\n", "↵\n");

/** A short piece of text with visible white space after the text before it; without a text, its ids. */
export const Piece = ({ text, ids, before }) => html`<div class="code"
  ><span class="muted">${marked(spelled(before ?? ""))}</span
  ><span class="differs">${typeof text === "string" ? marked(spelled(text)) : ids.join(" ")}</span
  >${ids.length === 0 && html`<i class="mark">nothing</i>`}</div>`;

const partAt = (parts, at) => parts.findLast(({ start, end }) => start <= at && at < end);

/** Return what is known of the sampled token i; a value that is not known is undefined. */
function sampledToken({ call, excluded, trained }, i) {
  const part = partAt(trained, i);
  const logprob = call.logprobs[i];
  const difference = part?.differences?.[i - part.start];
  return {
    logprob,
    ours: typeof difference === "number" ? logprob + difference : undefined,
    difference,
    weight: part?.weights?.[i - part.start],
    advantage: part?.advantage,
    step: part?.step,
    reason: partAt(excluded, i)?.reason,
    version: partAt(call.weight_versions, i)?.version,
  };
}

/** Name of a colouring -> the value of a sampled token, and of numbers the limits of the colours by size. */
export const COLOURS = {
  mask: [({ reason }) => (reason ? `not trained: ${reason}` : "trained")],
  "log-probability": [({ logprob }) => logprob, [0.1, 0.5, 1, 2, 4, 8]],
  difference: [({ difference }) => difference, [0.001, 0.01, 0.1, 0.5]],
  advantage: [({ advantage }) => advantage, [0.001, 0.5, 1, 1.5]],
  version: [({ version }) => version],
};
const NAMED = ["v1", "v2", "v3", "v4", "v5", "v6"];

/** Return the class of each position in prompt and completion, and a legend of [class, words]. */
function paint(view, name) {
  const [of, limits] = COLOURS[name];
  const values = view.call.completion_ids.map((_, i) => of(sampledToken(view, i)));
  const known = [...new Set(values)].filter((value) => typeof value === "string" && value !== "trained");
  const size = (number) => limits.filter((limit) => Math.abs(number) >= limit).length;
  const classOf = (value) => {
    if (typeof value === "number") return (value < 0 && size(value) ? "n" : "p") + size(value);
    return value === "trained" ? value : NAMED[known.indexOf(value) % NAMED.length] ?? "none";
  };
  const classes = view.call.prompt_ids.map(() => "prompt");
  for (const { start, end } of view.sampled) classes.fill("before", start, end);
  const legend = [["prompt", "prompt"], ["before", "sampled by an earlier call"]];
  if (limits) {
    legend.push(...limits.map((limit, i) => [`n${i + 1}`, `≤ −${limit}`]).reverse(), ["p0", "about 0"]);
    if (name !== "log-probability") legend.push(...limits.map((limit, i) => [`p${i + 1}`, `≥ ${limit}`]));
    legend.push(["none", "not known"]);
  } else {
    for (const value of new Set(values)) legend.push([classOf(value), value ?? "not known"]);
  }
  return { classes: classes.concat(values.map(classOf)), legend };
}

/** Return blocks {from, to, title, pieces}. A piece is {at, n, text, mark}: n tokens from the position `at` on. */
function makeBlocks(view, all) {
  const { prefix_length: before, prompt_ids: prompt } = view.call;
  const titles = { 0: "tokens of the calls before", [before]: NEW, [prompt.length]: "sampled" };
  const hasText = view.prompt_pieces && view.completion_pieces;
  const ids = all.map((id) => [`${id ?? "?"} `, 1]);
  const given = hasText ? [...view.prompt_pieces, ...view.completion_pieces] : ids;
  const blocks = [];
  let block = null;
  let at = 0;
  for (const [text, n, mark] of given) {
    const size = block ? at - block.from : 0;
    const ends = size >= 2 * BLOCK || (size >= BLOCK && block.pieces.at(-1).text.endsWith("\n"));
    if (!block || ends || titles[at]) blocks.push((block = { from: at, title: titles[at], pieces: [] }));
    block.pieces.push({ at, n, text, mark });
    at += n;
    block.to = at;
  }
  return blocks;
}

/** A block, whose tokens become elements when it comes near the view. */
function Block({ block, selected, classes, ids }) {
  const frame = useRef();
  const [seen, setSeen] = useState(false);
  const near = seen || selected !== null;
  useEffect(() => {
    const options = { root: frame.current.parentNode, rootMargin: "800px 0px" };
    const look = (entries) => entries.some((entry) => entry.isIntersecting) && setSeen(true);
    const observer = new IntersectionObserver(look, options);
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  const token = (piece) => {
    const [, text, end] = /^([^]*?)(\n?)$/.exec(spelled(piece.text));
    const kinds = [classes[piece.at], piece.mark === "special" && "special", piece.at === selected && "chosen"];
    const id = ids && html`<sub>${ids.slice(piece.at, piece.at + piece.n).join(" ")}</sub>`;
    return html`<span data-at=${piece.at} class=${kinds.filter(Boolean).join(" ")}>${marked(text)}${id}${end}</span>`;
  };
  const drawn = useMemo(() => near && block.pieces.map(token), [near, block, selected, classes, ids]);
  return html`<div class="block" ref=${frame}>${block.title && html`<h4>${block.title}</h4>`}
    ${drawn || marked(spelled(block.pieces.map(({ text }) => text).join("")))}</div>`;
}

/** What is known of a piece. */
function Details({ view, all, piece }) {
  if (!piece) return html`<p class="muted">Point at a token, or move with ← and →.</p>`;
  const i = piece.at - view.call.prompt_ids.length;
  const { logprob, ours, difference, weight, advantage, step, reason, version } = sampledToken(view, i);
  const made = /^[0-9a-f]{8}\.(\d+)\.\d+$/.exec(version ?? "");
  const from = partAt(view.sampled, piece.at);
  return html`<${Facts} rows=${[
    ["token", `${count(piece.at)} of ${count(all.length)}, ${i < 0 ? "prompt" : `sampled ${i}`}`],
    ["id", all.slice(piece.at, piece.at + piece.n).map((id) => id ?? "redacted").join(" ")],
    ["bytes", /^[0-9a-f ]+$/.test(piece.mark) ? piece.mark : null],
    ["sampled by", from && html`<${A} to=${toCall(view.call.session_id, from.call_id)} text=${from.call_id} />`],
    ["log-probability", short(logprob, 5)],
    ["trainer's", short(ours, 5)],
    ["difference", signed(difference)],
    ["weight", short(weight)],
    ["advantage", signed(advantage)],
    ["trained in", step !== undefined && html`<${A} to=${toSessions({ step })} text=${`step ${step}`} />`],
    ["weights that sampled it", version && html`<${A} to=${toSessions({ version })}
      text=${version + (made ? ` (made by optimizer step ${made[1]})` : "")} />`],
    ["not trained", reason],
  ]} />`;
}

export function Tokens({ view, colour, ids, token }) {
  const frame = useRef();
  const [pointed, setPointed] = useState(NaN);
  const all = useMemo(() => [...view.call.prompt_ids, ...view.call.completion_ids], [view]);
  const blocks = useMemo(() => makeBlocks(view, all), [view]);
  const { classes, legend } = useMemo(() => paint(view, colour), [view, colour]);
  const blockAt = (at) => blocks.find((block) => at >= block.from && at < block.to);
  const pieceAt = (at) => blockAt(at)?.pieces.find((piece) => at >= piece.at && at < piece.at + piece.n);
  const selected = token === undefined ? undefined : pieceAt(Number(token));
  const withSelected = selected && blockAt(selected.at);
  useLayoutEffect(() => {
    const start = withSelected ?? blocks.find((block) => block.title === NEW);
    frame.current.scrollTop = frame.current.children[blocks.indexOf(start)]?.offsetTop ?? 0;
  }, []);
  useEffect(() => {
    const chosen = frame.current.querySelector(".chosen")?.getBoundingClientRect();
    const seen = frame.current.getBoundingClientRect();
    const hidden = chosen && (chosen.top < seen.top || chosen.bottom > seen.bottom);
    if (hidden) frame.current.scrollTop += chosen.top - seen.top - seen.height / 3;
  }, [selected]);
  const move = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select")) return;
    const { token: address } = route().query; // which a key before this one may have changed just now
    const here = (address ? pieceAt(Number(address)) : null) ?? { at: view.call.prompt_ids.length, n: 0 };
    const to = { ArrowLeft: here.at - 1, ArrowRight: here.at + here.n, Home: 0, End: all.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const piece = pieceAt(Math.max(0, Math.min(all.length - 1, to)));
    if (piece) change({ token: piece.at });
  };
  useEffect(() => {
    addEventListener("keydown", move);
    return () => removeEventListener("keydown", move);
  }, [view]);
  const at = (event) => event.target.closest("[data-at]")?.dataset.at;
  const words = legend.map(([kind, text]) => html`<span class=${kind}><${T} text=${text} /></span>`);
  return html`<div class="legend">${words}</div>
    <div class="details" aria-live="polite">
      <${Details} view=${view} all=${all} piece=${pieceAt(pointed) ?? selected} /></div>
    <div class="tokens" ref=${frame} tabindex="0" role="group" aria-label="tokens"
      onClick=${(event) => at(event) && change({ token: at(event) })}
      onMouseOver=${(event) => setPointed(Number(at(event)))} onMouseLeave=${() => setPointed(NaN)}>
      ${blocks.map((block) => html`<${Block} key=${block.from} block=${block} classes=${classes}
        selected=${block === withSelected ? selected.at : null} ids=${ids ? all : null} />`)}</div>`;
}

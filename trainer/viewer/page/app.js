// The page: shows the view that the address names. A key presses the link or button with this `data-key`.
import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { follow, isFile, useData } from "./api.js";
import { CallPage } from "./call.js";
import { Compare } from "./compare.js";
import { route, toSession, toSessions } from "./route.js";
import { Run } from "./run.js";
import { Session } from "./session.js";
import { Sessions } from "./sessions.js";
import { A, visible, Wait } from "./widgets.js";

const KEYS = `g r  the run        g s  its sessions     /  search
j  next row         k  previous row       Enter  open it
[  previous call    ]  next call          c  next colouring of the tokens
← → Home End  move in the tokens          Esc  leave a field
?  these keys`;

function View({ parts: [view, id, , call], query }) {
  if (!view) return html`<${Run} query=${query} />`;
  if (view === "sessions") return html`<${Sessions} query=${query} />`;
  if (view === "session" && call) return html`<${CallPage} key=${id + call} id=${id} callId=${call} query=${query} />`;
  if (view === "session") return html`<${Session} key=${id} id=${id} query=${query} />`;
  if (view === "compare") return html`<${Compare} query=${query} />`;
  return html`<p class="error">There is no such view. <a href="#/">Open the run</a>.</p>`;
}

function Head({ parts: [view, id, , call] }) {
  const { data, error } = useData("api/run");
  const crumbs = [["#/", data?.run.name ?? "run", "g r"], [toSessions(), "sessions", "g s"]];
  if (id) crumbs.push([toSession(id), id]);
  if (call) crumbs.push([location.hash, `call ${call}`]);
  if (view === "compare") crumbs.push([location.hash, "compare"]);
  const here = view === "sessions" ? 1 : view ? crumbs.length - 1 : 0;
  return html`<header><strong>rolltap</strong><nav aria-label="views">${crumbs.map(([to, text, key], i) =>
      html`<${A} to=${to} text=${text} data-key=${key} aria-current=${i === here ? "page" : undefined} />`)}</nav>
    <span class="good">${data?.run.recording ? "● recording" : isFile ? "a file" : ""}</span>
    <button popovertarget="keys" data-key="?">keys: ?</button>
    <div id="keys" popover="auto" role="dialog" aria-label="keys">${KEYS}</div></header>
    ${error && html`<${Wait} error=${error} />`}`;
}

/** Move the focus to the next or previous row; at first, to one that is in view. */
function moveRow(step) {
  const rows = [...document.querySelectorAll("[data-row]")];
  const at = rows.indexOf(document.activeElement);
  const inView = (row) => row.getBoundingClientRect().top > 60 && row.getBoundingClientRect().bottom < innerHeight;
  const next = at < 0 ? rows.find(inView) ?? rows[0] : rows[at + step];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "nearest" });
}

function search() {
  const field = () => document.querySelector("[type=search]");
  if (field()) return field().focus();
  location.hash = toSessions();
  requestAnimationFrame(() => field()?.focus());
}

const ACTS = { j: () => moveRow(1), k: () => moveRow(-1), "/": search };
let before = "";

function onKey(event) {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.matches("input, select")) {
    if (key === "Escape") target.blur();
    return;
  }
  const bound = (keys) => document.querySelector(`[data-key="${CSS.escape(keys)}"]`);
  if (ACTS[key]) {
    event.preventDefault();
    ACTS[key]();
  } else (bound(`${before} ${key}`) ?? bound(key))?.click();
  before = key;
}

/** Return the title of a view, the most telling words first. */
function titleOf([view, id, , call], { a, b }, run) {
  const names = { sessions: "sessions", session: id, compare: `${a} and ${b}` };
  const what = call ? `call ${call} · ${id}` : names[view];
  return visible([what, run, "rolltap"].filter(Boolean).join(" · "));
}

function App() {
  const [, setVersion] = useState(0);
  useEffect(() => addEventListener("hashchange", () => setVersion((version) => version + 1)), []);
  const shown = route();
  const { data } = useData("api/run");
  useEffect(() => {
    document.title = titleOf(shown.parts, shown.query, data?.run.name);
  });
  return html`<${Head} parts=${shown.parts} /><main><${View} ...${shown} /></main>`;
}

const root = document.getElementById("root");
root.textContent = "";
render(html`<${App} />`, root);
addEventListener("keydown", onKey);
follow();

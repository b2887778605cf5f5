// The answers of the API: from the elements of a single file, else from the server; kept, and read again on changes.
import { useEffect, useState } from "./vendor/htm-preact.js";

const elements = new Map([...document.querySelectorAll("script[data-path]")].map((e) => [e.dataset.path, e]));
/** True in a single file: there is no server to search or to follow. */
export const isFile = elements.size > 0;
const MOST = 40; // answers that are kept; a call with its tokens can have megabytes

const cache = new Map();
const decoded = new Map(); // of a file: calls without the tokens of the calls before
const listeners = new Set();

export const sessionPath = (id) => `api/sessions/${encodeURIComponent(id)}`;
export const callPath = (id, call) => `${sessionPath(id)}/calls/${encodeURIComponent(call)}`;
/** Path of the comparison of two sessions; a file has it in one order only. */
export function comparePath(a, b) {
  const path = (first, second) => `api/compare?a=${encodeURIComponent(first)}&b=${encodeURIComponent(second)}`;
  return elements.has(path(b, a)) ? path(b, a) : path(a, b);
}

/** Return a promise of the JSON of a path. It fails with what the server says, in words. */
export function get(path) {
  if (!cache.has(path)) {
    const answer = isFile ? whole(path) : request(path);
    const oldest = [...cache.keys()].find((each) => each !== "api/run" && each !== "api/sessions");
    if (cache.size >= MOST) cache.delete(oldest);
    cache.set(path, answer);
    answer.catch(() => cache.delete(path));
  }
  return cache.get(path);
}

async function request(path) {
  const answer = await fetch("./" + path).catch(() => {
    throw new Error("The server does not answer. Start `rolltap view` again.");
  });
  const value = await answer.json().catch(() => ({ error: `The server answered ${answer.status} without JSON.` }));
  if (!answer.ok) throw new Error(value.error ?? `The server answered ${answer.status}.`);
  return value;
}

/** A call in a file has only the tokens after those of its parent, `prefix`: return it with those of all before it. */
async function whole(path) {
  const above = [];
  const { prefix, ...answer } = await decode(path);
  for (let next = prefix; next; next = above[0].prefix) above.unshift(await decode(next));
  if (prefix) {
    const ids = above.flatMap(({ call }) => [...call.prompt_ids, ...call.completion_ids]);
    answer.call = { ...answer.call, prompt_ids: [...ids, ...answer.call.prompt_ids] };
    const pieces = above.flatMap((each) => [...(each.prompt_pieces ?? []), ...(each.completion_pieces ?? [])]);
    answer.prompt_pieces &&= [...pieces, ...answer.prompt_pieces];
  }
  return answer;
}

function decode(path) {
  if (!decoded.has(path)) decoded.set(path, readElement(path));
  return decoded.get(path);
}

async function readElement(path) {
  const element = elements.get(path);
  if (!element) throw new Error("This is not in the file. Open the run with `rolltap view` to see it.");
  const bytes = Uint8Array.from(atob(element.textContent.trim()), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

/** Return {data, error} of a path, which change when the run grows. Old data stays until the new is there. */
export function useData(path) {
  const [state, setState] = useState({});
  useEffect(() => {
    const show = (answer) => listeners.has(changed) && setState(answer);
    const changed = (isChanged) =>
      isChanged(path) &&
      get(path).then(
        (data) => show({ path, data }),
        ({ message }) => show((old) => ({ ...(old.path === path && old), path, error: message })),
      );
    listeners.add(changed);
    changed(() => true);
    return () => listeners.delete(changed);
  }, [path]);
  return state.path === path ? state : {};
}

/** Follow the run: forget what changed and read it again if it is shown. A fifth of the time at most goes into this. */
export function follow() {
  if (isFile) return;
  const changed = new Set();
  let next = 0;
  setInterval(async () => {
    const began = performance.now();
    if (!changed.size || began < next) return;
    const paths = new Set(changed);
    const isChanged = (path) => paths.has(path.split("/calls/")[0]);
    changed.clear();
    next = Infinity;
    for (const path of [...cache.keys()].filter(isChanged)) cache.delete(path);
    for (const listener of [...listeners]) listener(isChanged);
    await Promise.allSettled(cache.values());
    next = 5 * performance.now() - 4 * began;
  }, 1000);
  new EventSource("./api/follow").addEventListener("changed", (event) => {
    changed.add("api/run").add("api/sessions");
    for (const id of JSON.parse(event.data).sessions) changed.add(sessionPath(id));
  });
}

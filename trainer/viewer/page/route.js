// The address: views and all that a link opens again are in the hash, as #/session/ID?lane=main.

/** Return {parts, query} of the address. */
export function route() {
  const [path, query = ""] = location.hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean);
  try {
    return { parts: parts.map(decodeURIComponent), query: Object.fromEntries(new URLSearchParams(query)) };
  } catch {
    return { parts: ["unreadable"], query: {} };
  }
}

/** Return the link to a view: parts of the path, and a query of which empty values are left out. */
export function href(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return "#/" + parts.map(encodeURIComponent).join("/") + (kept.length ? `?${new URLSearchParams(kept)}` : "");
}

export const toSessions = (query) => href(["sessions"], query);
export const toSession = (id) => href(["session", id]);
export const toCall = (id, call, query) => href(["session", id, "call", call], query);
export const toCompare = (a, b) => href(["compare"], { a, b });

/** Return the link to what is shown now, with a few values of the query changed. */
export function withQuery(changes) {
  const { parts, query } = route();
  return href(parts, { ...query, ...changes });
}

/** Change values of the query without an entry in the browser's history. */
export function change(changes) {
  history.replaceState(null, "", withQuery(changes));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Return the names that a value of the query has, as "ids,special". */
export const names = (value) => (value ?? "").split(",").filter(Boolean);

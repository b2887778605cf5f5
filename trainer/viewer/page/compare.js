// Two sessions of a group, side by side from where they part.
import { html } from "./vendor/htm-preact.js";
import { comparePath, sessionPath, useData } from "./api.js";
import { toCall, toSession } from "./route.js";
import { Piece } from "./tokens.js";
import { A, Card, count, Message, short, signed, Wait } from "./widgets.js";

/** Return [call id, message] of a session's main line: completed calls of the agent that no later one superseded. */
function mainLine(view) {
  const isMain = (call) => call.role === "agent" && call.status === "completed" && call.left_out !== "superseded";
  const messages = (call) => [...call.messages, call.reply].filter(Boolean);
  return view.calls.filter(isMain).flatMap((call) => messages(call).map((message) => [call.call_id, message]));
}

/** Return a message as text, without the ids of tool calls, which are other ones in each session. */
const comparable = ([, message]) =>
  JSON.stringify(message, (key, value) => (key === "id" || key === "tool_call_id" ? undefined : value));

/** Return what follows in two main lines after the first message that differs. */
function further(views) {
  const [first, second] = views.every(Boolean) ? views.map(mainLine) : [[], []];
  const equal = (line, i) => i < second.length && comparable(line) === comparable(second[i]);
  const parting = first.findIndex((line, i) => !equal(line, i));
  return [first, second].map((line) => line.slice((parting < 0 ? first.length : parting) + 1));
}

function Side({ side, data, rows, line }) {
  const { messages, tokens, [side]: id } = data;
  const row = rows?.find(({ session_id }) => session_id === id) ?? {};
  const link = (call, query) => html`<${A} data-row to=${toCall(id, call, query)} text=${`call ${call}`} />`;
  const call = tokens?.[`call_${side}`];
  return html`<${Card} title=${html`<${A} data-row to=${toSession(id)} text=${id} />`}
      note=${`${row.status}, reward ${short(row.reward) || "none"}, advantage ${signed(row.advantage) || "none"}`}>
    ${messages && html`<h3>message ${count(messages.common + 1)}</h3>
      <${Message} message=${messages[side] ?? { role: "the conversation ends here" }} />`}
    ${tokens && html`<h3>tokens from ${count(tokens.position)} on
        ${call && html` in ${link(call, { token: tokens.position })}`}</h3>
      <${Piece} text=${tokens.text?.[side]} ids=${tokens[side]} before=${tokens.text?.common} />`}
    ${line.map(([each, message], i) => html`${each !== line[i - 1]?.[0] && html`<h3>then in ${link(each)}</h3>`}
      <${Message} message=${message} />`)}<//>`;
}

export function Compare({ query: { a, b } }) {
  const { data, error } = useData(comparePath(a, b));
  const rows = useData("api/sessions").data?.sessions;
  const views = { [a]: useData(sessionPath(a)).data, [b]: useData(sessionPath(b)).data };
  if (!data) return html`<${Wait} error=${error} />`;
  const { messages, tokens } = data;
  const lines = further([views[data.a], views[data.b]]);
  return html`<h1>Where they part <small>${messages && `after ${count(messages.common)} equal messages, `}
      ${tokens ? `after ${count(tokens.position)} equal tokens` : "no tokens to compare"}</small></h1>
    <div class="two">${["a", "b"].map((side, i) =>
      html`<${Side} side=${side} data=${data} rows=${rows} line=${lines[i]} />`)}</div>`;
}

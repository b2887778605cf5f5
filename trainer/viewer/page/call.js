// A call: what the harness sent beside what the model saw, token by token.
import { html } from "./vendor/htm-preact.js";
import { callPath, useData } from "./api.js";
import { change, toCall, toSessions } from "./route.js";
import { COLOURS, Piece, Tokens } from "./tokens.js";
import { A, Badge, Card, Checks, count, duration, Facts, LeftOut, listed, Message, milliseconds } from "./widgets.js";
import { Select, Status, T, utc, Wait } from "./widgets.js";

function Difference({ view, id }) {
  const { difference, difference_text: text, call } = view;
  const side = (title, callId, name) => html`<div><h3>${title} <${A} text=${`call ${callId}`}
      to=${toCall(id, callId, { token: difference.position })} /></h3>
    <${Piece} text=${text?.[name]} ids=${difference[name]} before=${text?.common} /></div>`;
  return html`<${Card} title="First difference" note=${`after ${count(difference.position)} equal tokens`}>
    <p>Why it was rendered: <${T} text=${call.kind_reason} /></p>
    <div class="two">${side("recorded in", difference.call_id, "recorded")}
      ${side("rendered for", call.call_id, "rendered")}</div><//>`;
}

export function CallPage({ id, callId, query }) {
  const { data: view, error } = useData(callPath(id, callId));
  const colours = Object.keys(COLOURS);
  const colour = COLOURS[query.color] ? query.color : colours[0];
  const next = colours[(colours.indexOf(colour) + 1) % colours.length];
  const to = (call) => toCall(id, call, { color: query.color, show: query.show });
  if (!view) return html`<${Wait} error=${error} />`;
  const { call } = view;
  const { asked, ...applied } = call.sampling ?? {};
  const cached = typeof call.cached_tokens === "number" ? `, ${count(call.cached_tokens)} cached` : "";
  const spans = call.weight_versions.map(({ version, start, end }) =>
    html`<${A} to=${toSessions({ version })} text=${`${version} [${start}:${end}]`} /> `);
  const tools = call.tools ? call.tools.map((tool) => (tool.function ?? tool).name) : ["the parent's"];
  return html`<h1><${T} text=${`call ${call.call_id}`} /> <${Status} value=${call.status} />
      <${Badge} text=${call.kind} tone=${call.kind === "rendered" ? "rendered" : ""} /> <${Badge} text=${call.role} />
      <${LeftOut} call=${{ left_out: view.left_out, violation: call.violation }} />
      <small>${view.previous && html`<a data-key="[" href=${to(view.previous)}>[ previous</a>`}
        ${" "}${view.next && html`<a data-key="]" href=${to(view.next)}>next ]</a>`}</small></h1>
    <${Facts} rows=${[
      ["role", `${call.role}, ${call.role_evidence ? `by ${call.role_evidence}` : "by default"}`],
      ["prompt", `${count(call.prompt_ids.length)} tokens, ${count(call.prefix_length)} of them the parent's${cached}`],
      ["why", call.kind_reason],
      ["parent", view.parent_id && html`<${A} to=${to(view.parent_id)} text=${view.parent_id} />`],
      ["sampled", `${count(call.completion_ids.length)} tokens, ${call.finish_reason ?? "not finished"}`],
      ["error", call.error],
      ["weights", spans],
      ["sampling applied", listed(applied)],
      ["asked, not applied", listed(asked)],
      ["request", `${call.dialect} ${call.host}${call.path} ${call.model}${call.stream ? " streamed" : ""}`],
      ["engine", call.engine],
      ["time", duration(milliseconds(call.started_at, call.finished_at))],
      ["first token after", duration(milliseconds(call.started_at, call.first_token_at))],
      ["started (UTC)", utc(call.started_at)],
      ["tools", tools.join(", ") || "none"],
    ]} />
    ${view.difference && html`<${Difference} view=${view} id=${id} />`}
    <div class="two"><${Card} title="What the harness sent" note="new messages, and the reply">
        ${call.messages.map((message) => html`<${Message} message=${message} />`)}
        ${call.reply && html`<h3>reply</h3><${Message} message=${call.reply} />`}<//>
      <${Card} title="What the model saw" note=${view.prompt_pieces ? "" : "ids: the run's tokenizer is not here"}>
        <div class="bar"><${Select} name="color" label="colour" value=${colour} options=${colours} />
          <button data-key="c" onClick=${() => change({ color: next })}>next (c)</button>
          <${Checks} name="show" options=${["ids"]} value=${query.show} /></div>
        <${Tokens} view=${view} colour=${colour} ids=${query.show === "ids"} token=${query.token} /><//></div>`;
}

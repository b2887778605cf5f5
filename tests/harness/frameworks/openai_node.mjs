// An agent in a few lines: the openai SDK for JavaScript, whose requests are Node's own fetch.
import { writeFileSync } from "node:fs";
import OpenAI from "openai";

const schema = {
  type: "object",
  properties: { path: { type: "string" }, content: { type: "string" } },
  required: ["path", "content"],
};
const page = { type: "object", properties: { url: { type: "string" } }, required: ["url"] };
const tools = [
  { type: "function", function: { name: "write_file", description: "Write a file.", parameters: schema } },
  { type: "function", function: { name: "get_page", description: "Get a page.", parameters: page } },
];
const client = new OpenAI();
const messages = [{ role: "user", content: "Write notes.txt, twice." }];
for (;;) {
  const { message } = (await client.chat.completions.create({ model: "gpt-4.1", messages, tools })).choices[0];
  messages.push(message);
  if (!message.tool_calls?.length) {
    console.log(message.content);
    break;
  }
  for (const call of message.tool_calls) {
    const { path, content, url } = JSON.parse(call.function.arguments);
    if (path) writeFileSync(path, content);
    messages.push({ role: "tool", tool_call_id: call.id, content: url ? await (await fetch(url)).text() : "written" });
  }
}

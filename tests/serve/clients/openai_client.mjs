// OpenAI's JavaScript client: chats, tools and responses, whole and streamed.

import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const [{ id: model }] = (await client.models.list()).data;
const messages = [{ role: "user", content: "Say hello." }];
const chat = { model, messages, temperature: 0, max_tokens: 12 };
const properties = { place: { type: "string" }, days: { type: "integer" } };
const required = Object.keys(properties);
const parameters = { type: "object", properties, required, additionalProperties: false };

const whole = await client.chat.completions.create(chat);
const text = whole.choices[0].message.content;
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(streamed, text);
assert.equal(await client.chat.completions.stream(chat).finalContent(), text);

const tools = [{ type: "function", function: { name: "weather", parameters } }];
const forced = { ...chat, tools, tool_choice: "required", max_tokens: 300 };
const [call] = (await client.chat.completions.create(forced)).choices[0].message.tool_calls;
assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), required);
const message = (await client.chat.completions.stream(forced).finalMessage());
assert.equal(message.tool_calls[0].function.name, "weather");

const asked = { model, input: messages, temperature: 0, max_output_tokens: 12 };
assert.equal((await client.responses.create(asked)).output_text, text);
streamed = "";
const stream = client.responses.stream(asked);
for await (const event of stream) {
  if (event.type === "response.output_text.delta") streamed += event.delta;
}
assert.equal(streamed, text);
assert.equal((await stream.finalResponse()).output_text, text);

await assert.rejects(
  client.chat.completions.create({ ...chat, messages: [{ role: "user", content: "word ".repeat(9000) }] }),
  (error) => error.status === 400 && error.code === "context_length_exceeded",
);

// The official Node client against a running endpoint: node openai_node.mjs BASE_URL
// OPENAI_FROM names the folder whose node_modules has the package.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const require = createRequire(process.env.OPENAI_FROM + "/");
const { default: OpenAI } = require("openai");
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const model = "played";
const messages = [{ role: "user", content: "hi" }];
const parameters = { type: "object", properties: { harbour: { type: "string" } } };

const whole = await client.chat.completions.create({ model, messages });
const words = whole.choices[0].message.content;
assert.equal(whole.choices[0].finish_reason, "stop");
assert.ok(words.length > 0);

let streamed = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(streamed, words);
assert.ok(usage.total_tokens > 0);

const tools = [{ type: "function", function: { name: "fetch_tide", parameters } }];
const runner = client.chat.completions.stream({ model, messages, tools });
const final = await runner.finalChatCompletion();
const call = final.choices[0].message.tool_calls[0];
assert.equal(final.choices[0].finish_reason, "tool_calls");
assert.deepEqual(JSON.parse(call.function.arguments), { harbour: "Oban" });

const flat = [{ type: "function", name: "fetch_tide", parameters, strict: false }];
const events = [];
const told = client.responses.stream({ model, input: "hi", tools: flat });
for await (const event of told) events.push(event.type);
const response = await told.finalResponse();
assert.equal(events[0], "response.created");
assert.equal(events.at(-1), "response.completed");
assert.equal(response.output[0].name, "fetch_tide");
const next = await client.responses.create({
  model,
  previous_response_id: response.id,
  input: [{ type: "function_call_output", call_id: response.output[0].call_id, output: "high" }],
});
assert.equal(next.output_text, words);

const text = await client.completions.create({ model, prompt: "Once", echo: true });
assert.equal(text.choices[0].text, "Once" + words);

const models = await client.models.list();
assert.equal(models.data[0].id, model);
await assert.rejects(
  client.chat.completions.create({ model: "other", messages }),
  (error) => error.status === 404 && error.code === "model_not_found",
);
await assert.rejects(
  client.chat.completions.create({ model, messages, temperature: 9 }),
  (error) => error.status === 400 && error.param === "temperature",
);
console.log("node: ok");

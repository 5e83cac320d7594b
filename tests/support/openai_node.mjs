// What OpenAI's client for Node makes of a router: prints one JSON object for a test to look at.
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "Why is the sky blue?" }];
const seen = {};

for await (const one of client.models.list()) (seen.models ??= []).push(one.id);

const chat = await client.chat.completions.create({ model, messages, max_tokens: 12, logprobs: true });
seen.text = chat.choices[0].message.content;
seen.usage = chat.usage;
seen.logprobs = chat.choices[0].logprobs.content.length;

const stream = await client.chat.completions.create({
  model,
  messages,
  max_tokens: 12,
  stream: true,
  stream_options: { include_usage: true },
});
seen.streamed = "";
for await (const event of stream) {
  seen.streamed += event.choices[0]?.delta?.content ?? "";
  seen.finish = event.choices[0]?.finish_reason ?? seen.finish;
  seen.streamedUsage = event.usage ?? seen.streamedUsage;
}

const completion = await client.completions.create({ model, prompt: "hello", max_tokens: 12, n: 2 });
seen.choices = completion.choices.length;

try {
  await client.chat.completions.create({ model, messages: [], temperature: 9 });
} catch (error) {
  seen.error = { status: error.status, param: error.param, kind: error.constructor.name };
}

console.log(JSON.stringify(seen));

// What OpenCode's provider does with the server: a streamed tool turn with reasoning, its result sent back, an object.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "counterpoint",
  baseURL: process.argv[2] + "/v1",
  apiKey: "dummy",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("demo");
const found = { parts: [], errors: [] };

const stream = streamText({
  model,
  seed: 1,
  prompt: "What is the weather?",
  stopWhen: stepCountIs(2),
  tools: {
    weather: tool({
      description: "Look it up",
      inputSchema: z.object({ city: z.string() }),
      execute: async ({ city }) => {
        found.executed = city;
        return { degrees: 7 };
      },
    }),
  },
  onError: ({ error }) => found.errors.push(String(error)),
});
for await (const part of stream.fullStream) {
  const last = found.parts.at(-1);
  if (last?.type === part.type && typeof part.text === "string") last.text += part.text;
  else found.parts.push({ type: part.type, text: part.text, name: part.toolName, input: part.input });
}
found.text = await stream.text;
found.usage = await stream.totalUsage;

const whole = await generateText({ model, seed: 3, prompt: "hi" });
found.whole = { text: whole.text, reasoning: whole.reasoningText, finish: whole.finishReason };

const shaped = await generateText({
  model,
  seed: 4,
  prompt: "a person",
  output: Output.object({ schema: z.object({ name: z.string(), age: z.number().int() }) }),
});
found.object = shaped.output;

const controller = new AbortController();
const long = streamText({ model, seed: 5, prompt: "long", abortSignal: controller.signal, onError: () => {} });
for await (const _ of long.textStream) {
  controller.abort();
  break;
}
console.log(JSON.stringify(found));

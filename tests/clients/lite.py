"""Uses `ostinato serve` through LiteLLM: chats, streams, tools, completions, embeddings, the Responses API, errors and requests
at once. Usage: lite.py BASE_URL MODEL. The model's chat template has tools and reasoning."""

import asyncio
import json
import sys

import litellm

litellm.suppress_debug_info = True
base, name = sys.argv[1:]
reach = dict(api_base=base, api_key="none", num_retries=0)
asked = dict(
    reach,
    model=f"openai/{name}",
    messages=[{"role": "user", "content": "What is the weather in Rome?"}],
    temperature=0,
    extra_body={"chat_template_kwargs": {"enable_thinking": False}},
)
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]


def chats():
    whole = litellm.completion(**asked, max_tokens=16)
    chunks = list(litellm.completion(**asked, max_tokens=16, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 16


def tools():
    forced = dict(asked, max_tokens=200, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (call,) = litellm.completion(**forced).choices[0].message.tool_calls
    chunks = list(litellm.completion(**forced, stream=True))
    (again,) = litellm.stream_chunk_builder(chunks, messages=asked["messages"]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == json.loads(again.function.arguments)


def others():
    assert litellm.text_completion(prompt="Once", max_tokens=8, model=f"text-completion-openai/{name}", **reach).choices[0].text
    assert len(litellm.embedding(input=["one", "two"], model=asked["model"], **reach).data) == 2
    whole = litellm.responses(input="Hello", max_output_tokens=8, model=asked["model"], **reach)
    assert whole.status in ("completed", "incomplete")
    events = list(litellm.responses(input="Hello", max_output_tokens=8, stream=True, model=asked["model"], **reach))
    assert str(getattr(events[-1].type, "value", events[-1].type)) in ("response.completed", "response.incomplete")


def errors():
    long = dict(asked, messages=[{"role": "user", "content": "word " * 4000}])
    for kind, wrong in [
        (litellm.NotFoundError, dict(asked, model="openai/other")),
        (litellm.ContextWindowExceededError, long),
        (litellm.BadRequestError, dict(asked, temperature=-1)),
    ]:
        try:
            litellm.completion(**wrong, max_tokens=1)
        except kind:
            continue
        raise AssertionError(f"no {kind}")


async def at_once():
    answers = await asyncio.gather(*[litellm.acompletion(**asked, max_tokens=4) for _ in range(32)])
    assert all(answer.choices[0].finish_reason for answer in answers)


for check in (chats, tools, others, errors):
    check()
    print("litellm:", check.__name__, "ok", flush=True)
asyncio.run(at_once())
print("litellm: at_once ok", flush=True)

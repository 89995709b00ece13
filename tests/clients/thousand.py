"""Sends 1,000 requests to `ostinato serve`, 64 at a time, with the official client: whole answers, streams, several choices,
and streams that are given up. Checks that each ends once, and that nothing runs afterwards.
Usage: thousand.py BASE_URL MODEL ADMIN_URL."""

import asyncio
import collections
import json
import sys
import time
import urllib.request

import openai

base, model, admin = sys.argv[1:]
client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=600)
ends = collections.Counter()


async def request(number, places):
    asked = dict(model=model, messages=[{"role": "user", "content": f"Tell me story {number}."}], seed=number, max_tokens=1 + number % 12)
    async with places:
        kind = number % 4
        if kind == 0:
            answer = await client.chat.completions.create(**asked)
            assert [choice.finish_reason in ("stop", "length") for choice in answer.choices] == [True]
        elif kind == 1:
            answer = await client.chat.completions.create(**asked, n=2)
            assert sorted(choice.index for choice in answer.choices) == [0, 1]
            assert all(choice.finish_reason for choice in answer.choices)
        else:
            reasons = []
            stream = await client.chat.completions.create(**asked, stream=True)
            async for chunk in stream:
                reasons += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
                if kind == 3 and number % 8 == 3:
                    await stream.close()
                    ends["given up"] += 1
                    return
            assert len(reasons) == 1, reasons
        ends["ended"] += 1


async def main():
    places = asyncio.Semaphore(64)
    await asyncio.gather(*[request(number, places) for number in range(1000)])


begin = time.monotonic()
asyncio.run(main())
assert ends == {"ended": 875, "given up": 125}, ends
seconds = time.monotonic() - begin
until = time.monotonic() + 30
while True:
    running = json.load(urllib.request.urlopen(f"{admin}/api/requests"))["running"]
    if not running:
        break
    assert time.monotonic() < until, running
    time.sleep(0.1)
print(f"1,000 requests, 64 at once: 875 ended, 125 were given up, none runs; {seconds:.1f} s", flush=True)

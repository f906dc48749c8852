"""Stream the answer to one question, token by token.

python examples/chat.py [MODEL] [DEVICE]
"""

import sys

from isthmus import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
device = sys.argv[2] if len(sys.argv) > 2 else "auto"

messages = [
    {"role": "system", "content": "You answer in one or two sentences."},
    {"role": "user", "content": "Why is the sky blue?"},
]

with LLM(model, device=device, max_model_len=512) as llm:
    shown = ""
    for output in llm.stream_chat(messages, SamplingParams(temperature=0, max_tokens=80)):
        text = output.outputs[0].text
        print(text.removeprefix(shown), end="", flush=True)
        shown = text
    print()

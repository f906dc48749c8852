"""Complete a list of prompts at once, each with its own sampling parameters.

python examples/offline.py [MODEL] [DEVICE]
"""

import sys

from isthmus import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
device = sys.argv[2] if len(sys.argv) > 2 else "auto"

prompts = [
    "The capital of France is",
    "An isthmus is",
    "Once upon a time",
]
params = [
    SamplingParams(temperature=0, max_tokens=24),
    SamplingParams(temperature=0, max_tokens=48, stop=["\n"]),
    SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=48),
]

with LLM(model, device=device, max_model_len=512) as llm:
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        answer = output.outputs[0]
        print(f"{prompt!r} ->{answer.text!r} ({answer.finish_reason}, {len(answer.token_ids)} tokens)")

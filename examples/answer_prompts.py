"""Answer a file with a prompt in each line, and print a line of JSON for each.

python examples/answer_prompts.py ./my-checkpoint prompts.txt > answers.jsonl
"""

import json
import sys
from pathlib import Path

import zinfer

model, file = sys.argv[1:3]
prompts = [line for line in Path(file).read_text().splitlines() if line.strip()]
with zinfer.LLM(model) as llm:
    for output in llm.generate(prompts, zinfer.SamplingParams(temperature=0, max_tokens=64)):
        print(json.dumps({"prompt": output.prompt, "answer": output.outputs[0].text}))

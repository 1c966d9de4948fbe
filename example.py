"""The four steps of the course: build the engine, choose how to sample, generate, read the result.

python example.py [MODEL_FOLDER]        (the default model, which `make demo` or `nanovllm model get` has fetched)
"""

import sys

from nanovllm import LLM, SamplingParams, default_model_path


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else str(default_model_path())

    # 1) Build the engine: a model's folder, and the options of `Config`.
    llm = LLM(path, enforce_eager=True, tensor_parallel_size=1)

    # 2) Choose how tokens are sampled, and when to stop.
    sampling_params = SamplingParams(temperature=0.6, max_tokens=256)

    # 3) Generate for a batch of prompts. This one is plain text: the model continues it. `llm.chat` answers instead.
    prompts = ["Hello, nano-vllm."]
    outputs = llm.generate(prompts, sampling_params)

    # 4) One dict for each prompt, in their order.
    print(outputs[0]["text"])


if __name__ == "__main__":  # with tensor_parallel_size above 1, the other ranks import this file
    main()

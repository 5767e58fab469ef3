"""Greedy decoding without a cache: every token reads the whole text again."""

import torch

# LOSSLESS = False   # if its greedy answers need not be plain decoding's
# OWN_MODEL = True   # if it runs another model than the engine's target


def generate(engine, prompt, params, emit):
    """Continue the prompt's token ids; `emit` the ids of each step as soon as they are decided."""
    if params.temperature > 0:
        raise ValueError("this example only knows temperature 0")
    model, tokens = engine.target_model, list(prompt)
    for _ in range(params.max_tokens):
        with torch.inference_mode():
            ids = torch.tensor([tokens], device=model.device)
            token = int(model(input_ids=ids, use_cache=False).logits[0, -1].argmax())
        emit([token])
        tokens.append(token)
        if token in engine.target.loaded.eos_ids:
            return
